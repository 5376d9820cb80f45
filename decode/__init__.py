"""The decode pool. Life of a sequence here, by the queue it stands in:

    WAITING     accepted, holds nothing. Queue in rank order; nobody passes its head.
    RECEIVING   its prompt's blocks are reserved and prefill's slabs fill them; ends with the handoff.
    COMPUTING   its missing tokens are computed here in bounded chunks: a short remainder, a busy or missing prefill
                pool, or a sequence that was preempted and comes back.
    RUNNING     one token every step, together with everybody else who is RUNNING.
    FINISHED    holds nothing; the gateway has its last token, or has been told why not.

    Reserve ─▶ WAITING ─admitted─▶ RECEIVING ─handoff─▶ RUNNING ─▶ FINISHED
                  ▲      └────────▶ COMPUTING ─────────▶ │
                  └──────────── preempted ───────────────┘

A request with n choices is one sequence until its prompt's KV is complete, then n that share the prompt's blocks.
A request whose grammar is being compiled waits in the inbox, before it is WAITING.
`scheduler.py` is the only place where states change; `worker.py` is the loop; `intake.py` is the door for slabs.
"""
