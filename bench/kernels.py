"""`bench kernels`: how near the CPU kernels come to what this machine can do, on one thread, without a server.

1. limits     what one core reads and copies, and computes in a large matrix product (torch's or ours, the faster one)
2. linear     all matrix products of one step of the model: by our kernels with weights as they are kept, and kept as
              float32, and by torch's `F.linear`; the floor is the larger of float32 weights / read and operations /
              matrix product
3. attention  single new tokens over a paged cache, one layer of the model
4. step       one decode step of the model, everything but the sampler: with its own modules, with fused ones and
              weights kept as float32, and as they are kept; the last against the sum of its matrix products
5. prompt     the same for a prompt in chunks, and its operations a second as a share of the large matrix product's
6. quantised  steps and prompt once more, with int8 and int4 weights, against weights kept as float32

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

from ..engine.block_pool import BlockPool
from ..engine.checkpoint import resolve
from ..engine.fused import FusedLayer
from ..engine.kv_cache import KVCache
from ..engine.model import LoadedModel, load_model
from ..engine.packed import PackedLinear, Weight
from ..engine.runner import Chunk, Runner
from ..kernels.attention_cpu import Workspace, attend_on_cpu
from ..kernels.decoder_layer import DecoderLayer
from ..kernels.library import level, native
from ..kernels.pages import Pages
from ..kernels.quantized import QUANTIZATIONS, Quantization
from ..kernels.strips import Form, StripWeight
from .errors import BenchError
from .machine import describe_machine

BLOCK_SIZE = 16
LIMIT_MIB = 64  # what the limits are measured on: more than a last-level cache gives one core
ATTENTION_SEQUENCES = 8
PROMPT_TOKENS = 1024
CHUNK_TOKENS = 256  # as a prefill worker cuts it
LARGE_PRODUCT_OPERATIONS = 2 * 512 * 512 * 1024
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
    float32_ms: float
    torch_ms: float
    floor_ms: float
    gb_s: float  # of float32 weights, kept as such
    gflop_s: float


@dataclass(frozen=True)
class AttentionResult:
    context_tokens: int  # of each sequence
    native_ms: float
    torch_ms: float
    gb_s: float  # of KV, by the kernel in C


@dataclass(frozen=True)
class StepResult:
    rows: int
    own_ms: float
    float32_ms: float
    native_ms: float
    over_linears: float  # native / all its matrix products by our kernels


@dataclass(frozen=True)
class PromptResult:
    tokens: int
    own_ms: float
    native_ms: float
    gflop_s: float  # of matrix products and attention
    share_of_gemm: float


@dataclass(frozen=True)
class QuantizedResult:
    what: str
    float32_ms: float
    int8_ms: float
    int4_ms: float
    int8_share: float  # of float32's time
    int4_share: float


class Stopwatch:
    """Best times."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def best_s(self, run: Callable[[], object], share: float = 1.0) -> float:
        """The shortest of the runs that fit the time; at least three, after one that warms up."""
        return self.best_each_s([run], share)[0]

    def best_each_s(self, runs: Sequence[Callable[[], object]], share: float = 1.0) -> list[float]:
        """The shortest of each, taking turns: what disturbs one then disturbs all, and ratios stand."""
        best, rounds, until = [float("inf")] * len(runs), -1, time.perf_counter() + self._seconds * share
        while rounds < 3 or time.perf_counter() < until:
            for i, run in enumerate(runs):
                started = time.thread_time()
                run()
                if rounds >= 0:
                    best[i] = min(best[i], time.thread_time() - started)
            rounds += 1
        return best


def _large_products() -> tuple[Callable[[], object], Callable[[], object]]:
    """Torch's and ours; half a GFLOP each."""
    a, b = torch.randn(512, 1024), torch.randn(512, 1024)
    return partial(F.linear, a, b), partial(_strips(b).product, a)


def _strips(weight: Tensor, at_least: Form | None = None) -> StripWeight:
    library = native()
    assert library is not None
    return StripWeight(weight, library, Pages(), at_least)


def measure_limits(watch: Stopwatch) -> Limits:
    source = torch.ones(LIMIT_MIB << 18)
    target = torch.empty_like(source)
    source_bytes = source.numel() * 4
    return Limits(
        read_gb_s=source_bytes / watch.best_s(source.max) / 1e9,
        copy_gb_s=2 * source_bytes / watch.best_s(lambda: target.copy_(source)) / 1e9,
        gemm_gflop_s=LARGE_PRODUCT_OPERATIONS / min(watch.best_each_s(_large_products())) / 1e9,
    )


def _in_turn(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Callable[[], Tensor]:
    turn = cycle(products)
    return lambda: next(turn)(x)


def measure_linear(weights: Sequence[Tensor], rows: int, limits: Limits, watch: Stopwatch) -> LinearResult:
    """`weights`: all of a step, in its order. Each shape is measured by itself, its weights taking turns."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for weight in weights:
        shapes.setdefault(weight.shape, []).append(weight)
    native_s = float32_s = torch_s = 0.0
    for shape, alike in shapes.items():
        x = torch.randn(rows, shape[1])
        kinds = (
            [_strips(weight).product for weight in alike],
            [_strips(weight, "float32").product for weight in alike],
            [partial(F.linear, weight=weight) for weight in alike],
        )
        best = [len(alike) * watch.best_s(_in_turn(kind, x), 1 / len(shapes)) for kind in kinds]
        native_s, float32_s, torch_s = native_s + best[0], float32_s + best[1], torch_s + best[2]
    parameters = sum(weight.numel() for weight in weights)
    operations = 2 * rows * parameters
    floor_s = max(4 * parameters / limits.read_gb_s, operations / limits.gemm_gflop_s) / 1e9
    return LinearResult(
        rows, native_s * 1e3, float32_s * 1e3, torch_s * 1e3, floor_s * 1e3, 4 * parameters / float32_s / 1e9,
        operations / native_s / 1e9,
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


def measure_steps(model: LoadedModel, rows: Sequence[int], context: int, watch: Stopwatch) -> list[tuple[float, float]]:
    """Seconds of a decode step and of all its packed matrix products, for each number of rows."""
    per_sequence = -(-context // BLOCK_SIZE)
    runner = _runner(model, max(rows) * per_sequence)
    blocks = random.Random(0).sample(range(runner.cache.num_blocks), runner.cache.num_blocks)
    weights, found = packed_weights(model), []
    for count in rows:
        chunks = [
            Chunk([10 + row], context - 1, blocks[row * per_sequence : (row + 1) * per_sequence], True)
            for row in range(count)
        ]
        inputs = [torch.randn(count, k) for _, k in weights]

        def products(inputs: list[Tensor] = inputs) -> None:
            for x, (weight, _) in zip(inputs, weights, strict=True):
                weight.product(x)

        step_s, products_s = watch.best_each_s([partial(runner.forward, chunks), products], 4.0)
        found.append((step_s, products_s))
    return found


def prompt_tokens(model: LoadedModel) -> int:
    return min(PROMPT_TOKENS, model.max_model_len)


def measure_prompt(model: LoadedModel, watch: Stopwatch) -> tuple[float, float]:
    """Seconds of a whole prompt, and of the large matrix product meanwhile."""
    tokens = prompt_tokens(model)
    runner = _runner(model, -(-tokens // BLOCK_SIZE))
    blocks = random.Random(0).sample(range(runner.cache.num_blocks), runner.cache.num_blocks)
    total_s, product_s = 0.0, float("inf")
    for start in range(0, tokens, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, tokens)
        chunk = Chunk([10 + i % 100 for i in range(start, end)], start, blocks, end == tokens)
        chunk_s, *products_s = watch.best_each_s([partial(runner.forward, [chunk]), *_large_products()], 2.0)
        total_s += chunk_s
        product_s = min(product_s, *products_s)
    return total_s, product_s


def prompt_operations(model: LoadedModel, weights: Sequence[Tensor]) -> int:
    """Additions and multiplications of a prompt's matrix products and attention; logits of the last token alone."""
    tokens, config = prompt_tokens(model), model.module.config.get_text_config()
    *of_layers, head = (weight.numel() for weight in weights)  # the head is the last module of a causal model
    pairs = tokens * (tokens + 1) // 2 * config.num_attention_heads
    attention: int = sum(2 * pairs * (shape.k_head_dim + shape.v_head_dim) for shape in model.layout.layers)
    return 2 * tokens * sum(of_layers) + 2 * head + attention


def _prompt_result(tokens: int, operations: int, own_s: float, native_s: float, product_s: float) -> PromptResult:
    gflop_s = operations / native_s / 1e9
    share = gflop_s / (LARGE_PRODUCT_OPERATIONS / product_s / 1e9)
    return PromptResult(tokens, own_s * 1e3, native_s * 1e3, gflop_s, share)


def _runner(model: LoadedModel, num_blocks: int) -> Runner:
    cache = KVCache(model.layout, num_blocks, BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    runner = Runner(model, cache)
    runner.warm_up(BlockPool(num_blocks, BLOCK_SIZE))
    return runner


def weights_of(model: LoadedModel) -> list[Tensor]:
    """Of a model with its own modules."""
    return [module.weight for module in model.module.modules() if isinstance(module, nn.Linear)]


def packed_weights(model: LoadedModel) -> list[tuple[Weight, int]]:
    """And how many values each takes; none of a model with its own modules."""
    found: list[tuple[Weight, int]] = []
    for module in model.module.modules():
        if isinstance(module, FusedLayer):
            for part in module.layer.weights.projections.values() if isinstance(module.layer, DecoderLayer) else ():
                assert not isinstance(part.weight, Tensor)
                found.append((part.weight, part.shape[1]))
        elif isinstance(module, PackedLinear):
            found.append((module.weight, module.in_features))
    return found


def compare_quantized(
    name: str, rows: Sequence[int], context: int, watch: Stopwatch, float32_s: Sequence[float]
) -> list[QuantizedResult]:
    """`float32_s`: of a step of each number of rows, then of the prompt."""
    found: list[list[float]] = []
    for kind in QUANTIZATIONS:
        model = _load(name, True, kind)
        steps_s = [step_s for step_s, _ in measure_steps(model, rows, context, watch)]
        found.append([*steps_s, measure_prompt(model, watch)[0]])
        del model
        gc.collect()
    named = [*(f"{count} rows" for count in rows), "prompt"]
    return [
        QuantizedResult(what, 1e3 * plain, 1e3 * int8, 1e3 * int4, int8 / plain, int4 / plain)
        for what, plain, int8, int4 in zip(named, float32_s, *found, strict=True)
    ]


def _load(name: str, fused: bool, quantization: Quantization | None = None, form: Form | None = None) -> LoadedModel:
    return load_model(
        resolve(name), fingerprint="bench", dtype="float32", device="cpu", max_model_len=None,
        trust_remote_code=False, fused_modules=fused, quantization=quantization,
        weight_form=form,
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
        own_steps, own_prompt = measure_steps(own, rows, args.context, watch), measure_prompt(own, watch)
        linears = [measure_linear(weights_of(own), count, limits, watch) for count in rows]
        tokens, operations = prompt_tokens(own), prompt_operations(own, weights_of(own))
        config, shape = own.module.config.get_text_config(), own.layout.layers[0]
        attentions = [
            measure_attention(config.num_attention_heads, shape.kv_heads, shape.k_head_dim, context, watch)
            for context in contexts
        ]
        del own
        gc.collect()
        plain = _load(args.model, fused=True, form="float32")
        plain_steps, plain_prompt = measure_steps(plain, rows, args.context, watch), measure_prompt(plain, watch)
        del plain
        gc.collect()
        kept = _load(args.model, fused=True)
        kept_steps, kept_prompt = measure_steps(kept, rows, args.context, watch), measure_prompt(kept, watch)
        del kept
        gc.collect()
        steps = [
            StepResult(count, own_s * 1e3, plain_s * 1e3, kept_s * 1e3, kept_s / products_s)
            for count, (own_s, _), (plain_s, _), (kept_s, products_s) in zip(
                rows, own_steps, plain_steps, kept_steps, strict=True
            )
        ]
        prompt = _prompt_result(tokens, operations, own_prompt[0], *kept_prompt)
        float32_s = [*(step_s for step_s, _ in plain_steps), plain_prompt[0]]
        quantized = compare_quantized(args.model, rows, args.context, watch, float32_s)
    console = Console(width=REPORT_WIDTH)
    console.print(f"{machine.cpu}, load {machine.load_average}, kernels for {level()}, one thread")
    console.print(f"pdserve bench kernels {shlex.join(arguments)}", style="bold")
    _print_table(console, "limits", [limits], ["read GB/s", "copy GB/s", "matrix product GFLOP/s"])
    _print_table(
        console,
        "matrix products of a step, ms",
        linears,
        ["rows", "as kept", "float32", "F.linear", "floor", "GB/s", "GFLOP/s"],
    )
    _print_table(
        console, f"attention of {ATTENTION_SEQUENCES} sequences, one layer, ms", attentions,
        ["context", "C", "torch", "GB/s"],
    )  # fmt: skip
    _print_table(
        console, f"step at {args.context} tokens of context, ms", steps,
        ["rows", "own modules", "fused, float32", "as kept", "as kept / its products"],
    )  # fmt: skip
    _print_table(
        console, f"prompt in chunks of {CHUNK_TOKENS}, ms", [prompt],
        ["tokens", "own modules", "as kept", "GFLOP/s", "of the large product's"],
    )  # fmt: skip
    _print_table(
        console, "the same with quantised weights, ms", quantized,
        ["", "float32", "int8", "int4", "int8 / float32", "int4 / float32"],
    )  # fmt: skip
    print(
        json.dumps(
            {
                "bench": "kernels", "machine": asdict(machine), "level": level(), "arguments": arguments,
                "limits": asdict(limits), "linear": [asdict(r) for r in linears],
                "attention": [asdict(r) for r in attentions], "step": [asdict(r) for r in steps],
                "prompt": asdict(prompt), "quantized": [asdict(r) for r in quantized],
            }
        ),
        flush=True,
    )  # fmt: skip
    return 0
