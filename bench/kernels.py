"""`bench kernels`: how near the CPU kernels come to what this machine can do, on one thread, without a server.

1. limits     what one core reads and copies, and computes in a large matrix product
2. linear     all matrix products of one step of the model, by our kernels and by torch's `F.linear`; the floor is the
              larger of weights / read and operations / matrix product
3. attention  single new tokens over a paged cache, one layer of the model
4. step       one decode step of the model, and one chunk of a prompt, with its own modules and with fused ones;
              everything but the sampler

Every figure is the best of as many runs as fit `--seconds`, in processor time of the one thread: other work on the
machine makes runs longer (it takes cache and memory bandwidth), never shorter, and waiting for a core does not count.
Weights and caches take turns, so that they come from memory as they do in a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..engine.checkpoint import resolve
from ..engine.kv_cache import KVCache
from ..engine.model import LoadedModel, load_model
from ..engine.runner import Chunk, Runner
from ..kernels.attention_cpu import Workspace, attend_on_cpu
from ..kernels.library import level, native
from ..kernels.linear import linear
from .errors import BenchError
from .machine import describe_machine

BLOCK_SIZE = 16
LIMIT_MIB = 64  # what the limits are measured on: more than a last-level cache gives one core
ATTENTION_SEQUENCES = 8
PROMPT_TOKENS = 256  # of the chunk that is measured beside decode steps
REPORT_WIDTH = 110


@dataclass(frozen=True)
class Limits:
    read_gb_s: float
    copy_gb_s: float
    gemm_gflop_s: float


@dataclass(frozen=True)
class LinearResult:
    """All matrix products of a step."""

    rows: int
    native_ms: float
    torch_ms: float
    floor_ms: float
    gb_s: float  # of weights
    gflop_s: float


@dataclass(frozen=True)
class AttentionResult:
    context_tokens: int  # of each sequence
    native_ms: float
    torch_ms: float
    gb_s: float  # of KV, by the kernel in C


@dataclass(frozen=True)
class StepResult:
    what: str
    own_ms: float
    fused_ms: float


class Stopwatch:
    """Best times."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def best_s(self, run: Callable[[], object], share: float = 1.0) -> float:
        """The shortest of the runs that fit the time; at least three, after one that warms up."""
        run()
        best, runs, until = float("inf"), 0, time.perf_counter() + self._seconds * share
        while runs < 3 or time.perf_counter() < until:
            started = time.thread_time()
            run()
            best = min(best, time.thread_time() - started)
            runs += 1
        return best


def measure_limits(watch: Stopwatch) -> Limits:
    source = torch.ones(LIMIT_MIB << 18)
    target = torch.empty_like(source)
    a, b, c = torch.randn(512, 1024), torch.randn(1024, 512), torch.empty(512, 512)
    source_bytes = source.numel() * 4
    return Limits(
        read_gb_s=source_bytes / watch.best_s(source.max) / 1e9,
        copy_gb_s=2 * source_bytes / watch.best_s(lambda: target.copy_(source)) / 1e9,
        gemm_gflop_s=2 * 512 * 512 * 1024 / watch.best_s(lambda: torch.mm(a, b, out=c)) / 1e9,
    )


def _in_turn(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]) -> Callable[[], Tensor]:
    turn = cycle(weights)
    return lambda: product(x, next(turn))


def measure_linear(weights: Sequence[Tensor], rows: int, limits: Limits, watch: Stopwatch) -> LinearResult:
    """`weights`: all of a step, in its order. Each shape is measured by itself, its weights taking turns."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for weight in weights:
        shapes.setdefault(weight.shape, []).append(weight)
    mine_s = torchs_s = 0.0
    for shape, alike in shapes.items():
        x = torch.randn(rows, shape[1])
        mine_s += len(alike) * watch.best_s(_in_turn(linear, x, alike), 1 / len(shapes))
        torchs_s += len(alike) * watch.best_s(_in_turn(F.linear, x, alike), 1 / len(shapes))
    parameters = sum(weight.numel() for weight in weights)
    operations = 2 * rows * parameters
    floor_s = max(4 * parameters / limits.read_gb_s, operations / limits.gemm_gflop_s) / 1e9
    return LinearResult(
        rows, mine_s * 1e3, torchs_s * 1e3, floor_s * 1e3, 4 * parameters / mine_s / 1e9,
        operations / mine_s / 1e9,
    )  # fmt: skip


def measure_attention(heads: int, kv_heads: int, head_dim: int, context: int, watch: Stopwatch) -> AttentionResult:
    per_sequence = -(-context // BLOCK_SIZE)
    num_blocks = ATTENTION_SEQUENCES * per_sequence
    layers = max(2, (LIMIT_MIB << 20) // (num_blocks * BLOCK_SIZE * kv_heads * head_dim * 8))
    caches = [torch.randn(2, num_blocks, BLOCK_SIZE, kv_heads, head_dim) for _ in range(min(layers, 16))]
    tables = torch.randperm(num_blocks).view(ATTENTION_SEQUENCES, per_sequence)
    q = torch.randn(ATTENTION_SEQUENCES, heads, head_dim)

    def seconds(in_c: bool) -> float:
        workspace, turn = Workspace(), cycle(caches)

        def run() -> None:
            k_cache, v_cache = next(turn)
            attend_on_cpu(
                q, k_cache, v_cache, query_lens=[1] * len(q), context_lens=[context] * len(q), block_tables=tables,
                workspace=workspace, scale=head_dim**-0.5, window=None, softcap=None, sinks=None, in_c=in_c,
            )  # fmt: skip

        return watch.best_s(run)

    kv_bytes = len(q) * context * kv_heads * head_dim * 8
    mine_s = seconds(True)
    return AttentionResult(context, mine_s * 1e3, seconds(False) * 1e3, kv_bytes / mine_s / 1e9)


def measure_steps(model: LoadedModel, rows: Sequence[int], context: int, watch: Stopwatch) -> list[float]:
    """Milliseconds of a decode step, for each number of rows, and of the first chunk of a prompt."""
    per_sequence = -(-context // BLOCK_SIZE)
    cache = KVCache(model.layout, max(max(rows) * per_sequence, PROMPT_TOKENS // BLOCK_SIZE), BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    runner = Runner(model, cache)
    blocks = random.Random(0).sample(range(cache.num_blocks), cache.num_blocks)
    chunks = [
        Chunk([10 + row], context - 1, blocks[row * per_sequence : (row + 1) * per_sequence], True)
        for row in range(max(rows))
    ]
    batches = [chunks[:n] for n in rows]
    batches.append([Chunk([10 + i % 100 for i in range(PROMPT_TOKENS)], 0, blocks, True)])
    return [watch.best_s(partial(runner.forward, batch), 4.0) * 1e3 for batch in batches]


def weights_of(model: LoadedModel) -> list[Tensor]:
    weights = [module.weight for module in model.module.modules() if isinstance(module, nn.Linear)]
    return [weight for weight in weights if weight.dtype == torch.float32]


def _load(name: str, fused: bool) -> LoadedModel:
    return load_model(
        resolve(name), fingerprint="bench", dtype="float32", device="cpu", max_model_len=None,
        trust_remote_code=False, fused_modules=fused,
    )  # fmt: skip


def _print_table(console: Console, title: str, results: Sequence[object], headings: Sequence[str]) -> None:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in vars(result).values()))
    console.print(title, table)


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise BenchError(f"{flag} {text} is not a list of positive numbers such as 1,8,16")
    return numbers


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pdserve bench kernels", description="Measure the CPU kernels, one thread.")
    parser.add_argument("--model", default="demo", help="directory, .gguf file, hub id, or `demo`")
    parser.add_argument("--rows", default="1,8,16,32", help="tokens of a step")
    parser.add_argument("--context", type=int, default=128, help="tokens of every sequence in the step")
    parser.add_argument("--attention-contexts", default="128,1024,4096", help="tokens of the sequences that attend")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure; four times that for a step")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure, print the tables and one JSON line. Raises BenchError."""
    args = parse(arguments)
    rows, contexts = _numbers("--rows", args.rows), _numbers("--attention-contexts", args.attention_contexts)
    if args.context < 1 or args.seconds <= 0:
        raise BenchError("--context and --seconds must be above zero")
    if native() is None:
        raise BenchError("there are no kernels in C here (see above), so there is nothing to measure")
    machine = describe_machine()
    torch.set_num_threads(1)
    watch = Stopwatch(args.seconds)
    with torch.inference_mode():
        limits = measure_limits(watch)
        own = _load(args.model, fused=False)
        own_ms = measure_steps(own, rows, args.context, watch)
        del own
        gc.collect()
        fused = _load(args.model, fused=True)
        named = [*(f"{count} rows" for count in rows), f"prompt of {PROMPT_TOKENS}"]
        fused_ms = measure_steps(fused, rows, args.context, watch)
        steps = [StepResult(*row) for row in zip(named, own_ms, fused_ms, strict=True)]
        linears = [measure_linear(weights_of(fused), count, limits, watch) for count in rows]
        config, shape = fused.module.config.get_text_config(), fused.layout.layers[0]
        attentions = [
            measure_attention(config.num_attention_heads, shape.kv_heads, shape.k_head_dim, context, watch)
            for context in contexts
        ]
    console = Console(width=REPORT_WIDTH)
    console.print(f"{machine.cpu}, load {machine.load_average}, kernels for {level()}, one thread")
    console.print(f"pdserve bench kernels {shlex.join(arguments)}", style="bold")
    _print_table(console, "limits", [limits], ["read GB/s", "copy GB/s", "matrix product GFLOP/s"])
    _print_table(
        console, "matrix products of a step, ms", linears, ["rows", "C", "F.linear", "floor", "GB/s", "GFLOP/s"]
    )
    _print_table(
        console, f"attention of {ATTENTION_SEQUENCES} sequences, one layer, ms", attentions,
        ["context", "C", "torch", "GB/s"],
    )  # fmt: skip
    _print_table(console, f"step at {args.context} tokens of context, ms", steps, ["step", "own modules", "fused"])
    print(
        json.dumps(
            {
                "bench": "kernels", "machine": asdict(machine), "level": level(), "arguments": arguments,
                "limits": asdict(limits), "linear": [asdict(r) for r in linears],
                "attention": [asdict(r) for r in attentions], "step": [asdict(r) for r in steps],
            }
        ),
        flush=True,
    )  # fmt: skip
    return 0
