"""`bench perplexity`: what fewer bits cost in quality: perplexity of a fixed text, with each kind of weights.

The text is read from the documentation strings of Python's own standard library, so it needs no file and is the same
wherever the version of Python is. It is cut into windows; each is one sequence, computed in chunks as a worker would,
and every token but a window's first is scored.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.util
import json
import math
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from ..engine.checkpoint import resolve
from ..engine.kv_cache import KVCache
from ..engine.logprobs import score_prompts
from ..engine.model import LoadedModel, load_model
from ..engine.runner import Chunk, Runner
from ..kernels.quantized import Quantization
from .errors import BenchError
from .machine import describe_machine

# Much prose, little else, and hardly ever changed.
MODULES = (
    "argparse", "calendar", "collections", "contextlib", "csv", "datetime", "decimal", "difflib", "doctest",
    "fractions", "functools", "gettext", "heapq", "inspect", "ipaddress", "locale", "logging", "mailbox", "optparse",
    "pathlib", "pickle", "pprint", "random", "shutil", "statistics", "string", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "timeit", "trace", "traceback", "turtle", "typing", "unittest.case", "unittest.mock",
    "zipfile",
)  # fmt: skip
BLOCK_SIZE = 16
KINDS: dict[str, Quantization | None] = {"none": None} | {kind: kind for kind in get_args(Quantization)}


@dataclass(frozen=True)
class Score:
    weights: str
    perplexity: float
    more_percent: float  # than the first
    nats_per_token: float
    tokens_per_s: float


def documentation() -> Iterator[str]:
    """The documentation strings of MODULES, read from their sources: nothing is imported but the parents of some."""
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.has_location or spec.origin is None:
            continue
        for node in ast.walk(ast.parse(Path(spec.origin).read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield text


def windows_of(tokenizer: Any, window_tokens: int, num_windows: int) -> list[list[int]]:
    """The first tokens of the text, cut up."""
    ids: list[int] = []
    for text in documentation():
        ids += tokenizer.encode(text + "\n\n", add_special_tokens=False)
        if len(ids) >= window_tokens * num_windows:
            return [ids[i * window_tokens : (i + 1) * window_tokens] for i in range(num_windows)]
    raise BenchError(f"--windows {num_windows}: the text has only {len(ids)} tokens")


def score(model: LoadedModel, windows: Sequence[Sequence[int]], chunk_tokens: int) -> float:
    """Mean negative log-likelihood of a token, in nats. Raises BenchError where it is not finite."""
    blocks = list(range(-(-len(windows[0]) // BLOCK_SIZE)))
    runner = Runner(model, KVCache(model.layout, len(blocks), BLOCK_SIZE))
    total, count = 0.0, 0
    for window in windows:
        for start in range(0, len(window) - 1, chunk_tokens):
            ids = window[start : start + chunk_tokens]
            targets = window[start + 1 : start + 1 + chunk_tokens]
            chunk = Chunk(ids, start, blocks, sample=False, targets=targets)
            runner.forward([chunk])
            (entries,) = score_prompts(runner, [chunk], lambda: None)
            if entries is None:
                raise BenchError("a log probability is not finite")
            total -= sum(entry.logprob for entry in entries)
            count += len(entries)
    return total / count


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pdserve bench perplexity", description="What fewer bits cost in quality.")
    parser.add_argument("--model", default="demo", help="directory, .gguf file, hub id, or `demo`")
    parser.add_argument("--quantization", default="none,int8,int4", help="kinds of weights, the first to compare with")
    parser.add_argument("--windows", type=int, default=32, help="sequences")
    parser.add_argument("--window-tokens", type=int, default=512, help="tokens of each")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="computed in one step")
    return parser.parse_args(arguments)


def measure(
    path: Path, kinds: Sequence[str], windows: Sequence[Sequence[int]], chunk_tokens: int
) -> Iterator[Score]:
    first: float | None = None
    for kind in kinds:
        model = load_model(
            path, fingerprint="bench", dtype="float32", device="cpu", max_model_len=None, trust_remote_code=False,
            quantization=KINDS[kind],
        )  # fmt: skip
        started = time.perf_counter()
        nats = score(model, windows, chunk_tokens)
        speed = sum(map(len, windows)) / (time.perf_counter() - started)
        first = nats if first is None else first
        yield Score(kind, math.exp(nats), 100.0 * math.expm1(nats - first), nats, speed)
        del model
        gc.collect()


def main(arguments: list[str]) -> int:
    """Measure, print a table and one JSON line. Raises BenchError."""
    args = parse(arguments)
    kinds = args.quantization.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise BenchError(f"--quantization {unknown[0]!r} is none of {', '.join(KINDS)}")
    if args.windows < 1 or args.window_tokens < 2 or args.chunk_tokens < 1:
        raise BenchError("--windows and --chunk-tokens must be above zero, --window-tokens above one")
    machine = describe_machine()
    path = resolve(args.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    windows = windows_of(tokenizer, args.window_tokens, args.windows)
    torch.set_num_threads(1)
    scores = list(measure(path, kinds, windows, args.chunk_tokens))
    console = Console()
    console.print(f"pdserve bench perplexity {shlex.join(arguments)}", style="bold")
    version = platform.python_version()
    console.print(f"{args.windows} windows of {args.window_tokens} tokens, documentation of Python {version}")
    table = Table()
    for heading in ("weights", "perplexity", "more, %", "nats a token", "tokens/s"):
        table.add_column(heading, justify="right")
    for row in scores:
        table.add_row(
            row.weights, f"{row.perplexity:.3f}", f"{row.more_percent:.2f}", f"{row.nats_per_token:.4f}",
            f"{row.tokens_per_s:.0f}",
        )  # fmt: skip
    console.print(table)
    result = {
        "bench": "perplexity", "machine": asdict(machine), "python": platform.python_version(), "arguments": arguments,
        "scores": [asdict(row) for row in scores],
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return 0
