"""Load generation against servers, over HTTP only; kernels and links by themselves.

Life of a benchmark request:

    1. workload   lengths, arrival time and token ids are drawn from the seed, or read from a trace (traces, prompts)
    2. load       closed loop: sent when a client is free; open loop: sent at its time, whatever came back so far
    3. client     one streamed POST; each chunk's tokens get the monotonic time at which its bytes arrived (sse)
    4. record     every latency is a difference of two of those times (record)
    5. report     percentiles over requests or gaps, a table, and one JSON line last on stdout (stats, report)

`goodput` and `peers` do that for one server after another, which they start and end themselves (contestants, lineup,
servers). `kernels` and `transfer` need no server: they run the code of the pools.

`python -m pdserve.bench serve --help` lists the options; `README.md` says what each figure means.
"""
