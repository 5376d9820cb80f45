"""`bench transfer`: how fast KV moves between two processes of this machine, against a plain copy on one core.

1. copy      what `memcpy` does on one core, out of memory into memory, in pieces as large as a layer's KV of a chunk
2. links     prompts, several under way: GB/s by the clock, and what either end's processor time would allow
3. exposed   one prompt at a time: what a prefill step waits for while its KV is copied out, and how long after the last
             layer decode has all of it. With --url, as a share of the time to first token of a running system

All of it goes through the code of the pools themselves (`transfer_ends.py`), checksums included.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np

from ..transfer.layout import DTYPE_BYTES, KVLayout
from .checkpoint import model_directory
from .client import Client, find_model, open_session
from .errors import BenchError
from .load import Run
from .machine import describe_machine
from .options import fresh_seed, http_url, positive, positive_int
from .other_load import OtherLoad
from .output import command_line, print_json, print_origin, report_console, table_of
from .prompts import DEFAULT_FIRST_ID, DEFAULT_LAST_ID, PromptMaker, id_pieces
from .transfer_ends import LINKS, Job, Moved, layout_of, layout_of_model, move
from .workload import synthetic

COPY_BYTES = 256 << 20  # far more than a last-level cache
MIN_COPIES = 3
LAYOUT = re.compile(r"(\d{1,4})x(\d{1,4})x(\d{1,4}):(float32|float16|bfloat16)")
TTFT_REPS = 3
MAX_LAYERS = 1024


@dataclass(frozen=True)
class Result:
    """One link with one size of chunks. `share`: of a plain copy in pieces of the size of one layer's KV of a chunk."""

    link: str
    layer_kib: float
    gb_s: float
    share: float
    sender_gb_s: float  # if it had only the sender's processor time to wait for
    receiver_gb_s: float
    ship_ms: float  # of a prompt alone
    tail_ms: float
    by_frame: int


def copy_gb_s(piece_bytes: int, seconds: float) -> float:
    """The best rate of one core at copying pieces of that size, in processor time; bytes copied, not read + written."""
    pieces = max(1, COPY_BYTES // piece_bytes)
    source, target = np.ones(pieces * piece_bytes, np.uint8), np.zeros(pieces * piece_bytes, np.uint8)
    places = [(target.ctypes.data + i * piece_bytes, source.ctypes.data + i * piece_bytes) for i in range(pieces)]
    best, copies, until = float("inf"), 0, time.perf_counter() + seconds
    while copies < MIN_COPIES or time.perf_counter() < until:
        started = time.thread_time()
        for to, of in places:
            ctypes.memmove(to, of, piece_bytes)
        best = min(best, time.thread_time() - started)
        copies += 1
    return float(source.nbytes / best / 1e9)


def result_of(job: Job, together: Moved, alone: Moved, copy: float) -> Result:
    gb_s = together.num_bytes / together.wall_s / 1e9
    return Result(
        link=job.link,
        layer_kib=job.chunk_tokens * job.layout.layer_bytes_per_token(0) / 1024,
        gb_s=gb_s,
        share=gb_s / copy,
        sender_gb_s=together.num_bytes / together.sender_cpu_s / 1e9,
        receiver_gb_s=together.num_bytes / together.receiver_cpu_s / 1e9,
        ship_ms=alone.ship_s * 1000,
        tail_ms=alone.tail_s * 1000,
        by_frame=together.by_frame,
    )


async def ttft_ms(url: str, prompt_tokens: int) -> float:
    """Of one prompt at a time, median. Raises BenchError."""
    async with open_session(timeout_s=300.0) as session:
        model = await find_model(session, url, None)
        run = Run(Client(session, url, model.name))
        maker = PromptMaker(id_pieces(DEFAULT_FIRST_ID, DEFAULT_LAST_ID), fresh_seed())
        plan = synthetic(maker, "ttft", input_tokens=prompt_tokens, output_tokens=2, prefix_tokens=0, times=None)
        await run.closed_loop(islice(plan, 1 + TTFT_REPS), concurrency=1)
    found = [record.ttft_s * 1000 for record in run.records[1:] if record.ok and record.ttft_s is not None]
    if not found:
        raise BenchError(f"--url: {run.records[0].error}: {run.records[0].detail}")
    return statistics.median(found)


def _layout(text: str) -> KVLayout:
    match = LAYOUT.fullmatch(text)
    layers, heads, dim = (int(number) for number in match.groups()[:3]) if match else (0, 0, 0)
    if match is None or not (0 < layers <= MAX_LAYERS and heads and dim):
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYERSxKV_HEADSxHEAD_DIM:DTYPE, such as 32x8x128:bfloat16")
    return layout_of(layers, heads, dim, match[4])


def _sizes(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pdserve bench transfer", description="Measure the links between the pools, without a model."
    )
    parser.add_argument("--model", default="demo", help="whose KV layout is used (%(default)s)")
    parser.add_argument("--layout", type=_layout, metavar="LxHxD:DTYPE", help="instead, such as 32x8x128:bfloat16")
    parser.add_argument("--prompt-tokens", type=positive_int, default=512, metavar="N", help="(%(default)s)")
    parser.add_argument("--chunk-tokens", type=_sizes, default=[256, 512], metavar="N,…",
                        help="of a prefill step; small layers share a slab (256,512)")  # fmt: skip
    parser.add_argument("--links", default=",".join(LINKS), metavar="L,…", help="of %(default)s")
    parser.add_argument("--seconds", type=positive, default=3.0, help="for each figure (%(default)s)")
    parser.add_argument("--url", type=http_url, help="a running system: the exposed time as a share of its TTFT")
    args = parser.parse_args(arguments)
    args.links = args.links.split(",")
    if unknown := [link for link in args.links if link not in LINKS]:
        raise BenchError(f"--links: {unknown[0]!r} is not one of {', '.join(LINKS)}")
    if max(args.chunk_tokens) > args.prompt_tokens:
        raise BenchError("--chunk-tokens must not exceed --prompt-tokens")
    return args


def _measure(args: argparse.Namespace, layout: KVLayout) -> tuple[dict[int, float], list[Result]]:
    cores = sorted(os.sched_getaffinity(0))
    copies: dict[int, float] = {}
    results = []
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-", dir="/tmp") as directory:  # a socket's path is short
        for chunk_tokens in args.chunk_tokens:
            piece_bytes = chunk_tokens * layout.layer_bytes_per_token(0)
            copies[piece_bytes] = copy_gb_s(piece_bytes, args.seconds / 3)
            for link in args.links:
                job = Job(link, layout, args.prompt_tokens, chunk_tokens)
                together, alone = move(job, directory, (cores[0], cores[-1]), args.seconds)
                results.append(result_of(job, together, alone, copies[piece_bytes]))
    os.sched_setaffinity(0, cores)
    return copies, results


def main(arguments: list[str]) -> int:
    """Measure, print the table and one JSON line. Raises BenchError."""
    args = parse(arguments)
    machine, command = describe_machine(), command_line("transfer", arguments)
    layout = args.layout or layout_of_model(model_directory(args.model))
    first_token_ms = asyncio.run(ttft_ms(args.url, args.prompt_tokens)) if args.url else None
    others = OtherLoad()
    copies, results = _measure(args, layout)
    other_cores = others.cores()
    console = report_console()
    print_origin(console, machine, command)
    shape = layout.layers[0]
    console.print(
        f"KV           {layout.num_layers} layers x {shape.kv_heads} heads x {shape.k_head_dim}, {layout.dtype} "
        f"({DTYPE_BYTES[layout.dtype]} bytes): prompts of {args.prompt_tokens} tokens are "
        f"{args.prompt_tokens * layout.bytes_per_token / 1e6:.1f} MB",
        markup=False,
    )
    headings = ["link", "layer KiB", "GB/s", "of memcpy", "sender's limit", "receiver's limit", "ship ms", "tail ms"]
    rows = [["memcpy", f"{piece / 1024:.0f}", f"{gb_s:.2f}", "100%", *["-"] * 4] for piece, gb_s in copies.items()]
    rows += [
        [r.link, f"{r.layer_kib:.0f}", f"{r.gb_s:.2f}", f"{r.share:.0%}", f"{r.sender_gb_s:.2f}",
         f"{r.receiver_gb_s:.2f}", f"{r.ship_ms:.1f}", f"{r.tail_ms:.1f}"]
        for r in results
    ]  # fmt: skip
    if first_token_ms is not None:
        headings.append("of TTFT")
        rows = [[*row, "-"] for row in rows[: len(copies)]] + [
            [*row, f"{(r.ship_ms + r.tail_ms) / first_token_ms:.1%}"]
            for row, r in zip(rows[len(copies) :], results, strict=True)
        ]
    console.print(table_of("KV between two processes", headings, rows))
    for r in results:
        if r.by_frame:
            console.print(f"note         {r.by_frame} slabs found no room in the ring of {r.link}", markup=False)
    if other_cores is not None:
        console.print(f"note         other work took {other_cores:.2f} cores", markup=False)
    figures = {
        "prompt_tokens": args.prompt_tokens, "memcpy_gb_s": {str(piece): gb_s for piece, gb_s in copies.items()},
        "results": [asdict(result) for result in results], "ttft_ms": first_token_ms, "other_cores": other_cores,
    }  # fmt: skip
    print_json("transfer", machine, command, figures)
    return 0
