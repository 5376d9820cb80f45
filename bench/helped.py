"""`bench helped`: what a helper thread on a second core is worth, in steps of a model, without a server.

Steps with and without it take turns in one run, and the best of each counts, by the clock: what a second core gives
cannot be seen in processor time. So neither core should have anything else to do.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from ..engine.checkpoint import resolve
from ..engine.kv_cache import KVCache
from ..engine.model import LoadedModel, load_model
from ..engine.runner import Chunk, Runner
from ..kernels.library import level, native
from ..kernels.threads import set_helpers
from .errors import BenchError
from .machine import describe_machine

BLOCK_SIZE = 16
CHUNK_TOKENS = 256
PROMPT_SHARE = 2.0  # of a figure's time, for the prompt


@dataclass(frozen=True)
class HelpedResult:
    what: str
    alone_ms: float
    helped_ms: float
    ratio: float  # of the best times


def measure(library: ctypes.CDLL, core: int, what: str, run: Callable[[], object], seconds: float) -> HelpedResult:
    """`run` alone and with a helper on `core`, in turns for so long. Raises BenchError if there can be no helper."""
    best = [float("inf")] * 2  # by the number of helpers
    until = time.perf_counter() + seconds
    try:
        while time.perf_counter() < until or min(best) == float("inf"):
            for helpers in range(2):
                if set_helpers(library, [core] * helpers) != helpers:
                    raise BenchError(f"--helper-core {core} is not a core this process may use")
                started = time.perf_counter()
                run()
                best[helpers] = min(best[helpers], time.perf_counter() - started)
    finally:
        set_helpers(library, [])
    return HelpedResult(what, best[0] * 1e3, best[1] * 1e3, best[1] / best[0])


def steps_of(model: LoadedModel, rows: Sequence[int], context: int, prompt: int) -> dict[str, Callable[[], object]]:
    """A decode step for each number of rows, and a whole prompt in chunks, by what they are called."""
    per_sequence = -(-context // BLOCK_SIZE)
    num_blocks = max(max(rows) * per_sequence, -(-prompt // BLOCK_SIZE))
    cache = KVCache(model.layout, num_blocks, BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    runner = Runner(model, cache)
    blocks = random.Random(0).sample(range(num_blocks), num_blocks)

    def step(count: int) -> None:
        tables = [blocks[row * per_sequence : (row + 1) * per_sequence] for row in range(count)]
        runner.forward([Chunk([10 + row], context - 1, table, True) for row, table in enumerate(tables)])

    def read() -> None:
        for start in range(0, prompt, CHUNK_TOKENS):
            tokens = [10 + i % 100 for i in range(start, min(start + CHUNK_TOKENS, prompt))]
            runner.forward([Chunk(tokens, start, blocks, start + len(tokens) == prompt)])

    steps: dict[str, Callable[[], object]] = {f"step of {n} rows": lambda n=n: step(n) for n in rows}  # type: ignore[misc]
    return steps | {f"prompt of {prompt}": read}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pdserve bench helped", description="Measure steps with a helper thread.")
    parser.add_argument("--model", default="demo", help="directory, .gguf file, hub id, or `demo`")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--core", type=int, default=0, help="for the step")
    parser.add_argument("--helper-core", type=int, default=1, help="for the helper")
    parser.add_argument("--rows", default="1,8,16", help="tokens of a step")
    parser.add_argument("--context", type=int, default=128, help="tokens of every sequence in the step")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each figure; twice that for the prompt")
    args = parser.parse_args(arguments)
    try:
        args.rows = [int(part) for part in args.rows.split(",")]
    except ValueError:
        raise BenchError(f"--rows {args.rows} is not a list of numbers such as 1,8,16") from None
    if min(*args.rows, args.context, args.prompt) < 1:
        raise BenchError("--rows, --context and --prompt must be above zero")
    return args


def main(arguments: list[str]) -> int:
    """Measure, print the table and one JSON line. Raises BenchError."""
    args, library = parse(arguments), native()
    if library is None:
        raise BenchError("there are no kernels in C here (see above), so there is nothing to help with")
    if args.core not in os.sched_getaffinity(0):
        raise BenchError(f"--core {args.core} is not a core this process may use")
    os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    machine = describe_machine()
    model = load_model(
        resolve(args.model), fingerprint="bench", dtype="float32", device="cpu", max_model_len=None,
        trust_remote_code=False, quantization=args.quantization,
    )  # fmt: skip
    table = Table(title=f"best times, a helper on core {args.helper_core}")
    for heading in ("", "alone, ms", "helped, ms", "ratio"):
        table.add_column(heading, justify="right")
    results = []
    for what, run in steps_of(model, args.rows, args.context, args.prompt).items():
        seconds = args.seconds * (PROMPT_SHARE if what.startswith("prompt") else 1.0)
        results.append(measure(library, args.helper_core, what, run, seconds))
        table.add_row(what, *(f"{value:.2f}" for value in list(vars(results[-1]).values())[1:]))
    console = Console(width=110)
    console.print(f"{machine.cpu}, load {machine.load_average}, kernels for {level()}")
    console.print(f"pdserve bench helped {shlex.join(arguments)}", style="bold")
    console.print(table)
    figures = {"bench": "helped", "machine": asdict(machine), "results": [asdict(result) for result in results]}
    print(json.dumps(figures), flush=True)
    return 0
