"""Paged attention on the device: right on every kind of model, and how fast beside a copy and beside torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.attention import AttentionBatch, DecodeBatch, decode_attention, paged_attention
from .device_clock import REPEAT, WARM_UP, copy_bytes_per_s, seconds
from .device_report import Check, Setting

SCALE = 0.125
CALLS = 20  # measured together, as the layers of a step follow each other
TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # of values about 1 in size
DRY_DTYPES = (torch.float32, torch.float16)  # Triton's interpreter multiplies no matrices of bfloat16

DECODE_SHARES = {(64, 4096): 0.90, (1, 131_072): 0.75}  # of the copy ceiling, by (sequences, context)
DRY_DECODE_SHARES = {(3, 40): 0.90, (1, 100): 0.75}
PREFILL_SHARE = 0.70  # of torch's flash attention


@dataclass(frozen=True)
class Model:
    """What attention sees of one."""

    heads: int
    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


LLAMA = Model(32, 8, 128, 128)
MODELS = {
    "Llama 8B": LLAMA,
    "SmolLM2, pages of 32": Model(9, 3, 64, 64, block_size=32),
    "Gemma 2, pages of 64": Model(8, 4, 256, 256, block_size=64, window=700, softcap=50.0),
    "GPT-OSS, pages of 128": Model(64, 8, 64, 64, block_size=128, window=128, sinks=True),
    "DeepSeek, pages of 16": Model(16, 16, 192, 128),
    "odd sizes": Model(7, 1, 80, 40, block_size=3, window=33),
}
DRY_MODELS = {"tiny": Model(4, 2, 16, 16), "odd sizes": Model(3, 1, 10, 7, block_size=3, window=5, sinks=True)}

# New tokens and context of each sequence of a step.
LENGTHS = ((1, 4000), (1, 1), (300, 900), (1, 513), (64, 64), (2, 2049), (1, 700))
DRY_LENGTHS = ((1, 40), (1, 1), (9, 25), (5, 5))


@dataclass(frozen=True)
class Step:
    """Sequences over shuffled blocks, and what one layer is given."""

    model: Model
    lengths: tuple[tuple[int, int], ...]
    q: Tensor  # [num_tokens, heads, k_head_dim]
    k_cache: Tensor  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor  # [num_blocks, block_size, kv_heads, v_head_dim]
    sinks: Tensor | None  # [heads]
    batch: AttentionBatch

    def attend(self) -> Tensor:  # [num_tokens, heads, v_head_dim]
        return paged_attention(
            self.q, self.k_cache, self.v_cache, self.batch,
            scale=SCALE, window=self.model.window, softcap=self.model.softcap, sinks=self.sinks,
        )  # fmt: skip

    def attend_decode(self, batch: DecodeBatch) -> Tensor:  # [num_seqs, heads, v_head_dim]
        return decode_attention(
            self.q, self.k_cache, self.v_cache, batch,
            scale=SCALE, window=self.model.window, softcap=self.model.softcap, sinks=self.sinks,
        )  # fmt: skip


def make_step(
    model: Model, lengths: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device, *, poison: bool
) -> Step:
    """`poison`: memory that holds no token of a sequence is NaN."""
    generator = torch.Generator(device).manual_seed(0)
    size = model.block_size
    used = [-(-context // size) for _, context in lengths]
    free = torch.randperm(sum(used) + 2, generator=generator, device=device)
    tables = torch.zeros(len(lengths), max(used), dtype=torch.int64, device=device)
    places = []
    for row, (blocks, (_, context)) in enumerate(zip(torch.split(free, [*used, 2])[:-1], lengths, strict=True)):
        tables[row, : len(blocks)] = blocks
        places.append((blocks[:, None] * size + torch.arange(size, device=device)).flatten()[:context])
    slots = torch.cat([place[context - new :] for place, (new, context) in zip(places, lengths, strict=True)])
    written = torch.cat(places)
    caches = []
    for dim in (model.k_head_dim, model.v_head_dim):
        cache = torch.empty(len(free) * size, model.kv_heads, dim, dtype=dtype, device=device)
        if poison:
            cache.fill_(float("nan"))
        shape = (len(written), model.kv_heads, dim)
        cache[written] = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        caches.append(cache.view(len(free), size, model.kv_heads, dim))
    q = torch.randn(len(slots), model.heads, model.k_head_dim, generator=generator, device=device, dtype=dtype)
    sinks = torch.randn(model.heads, generator=generator, device=device) if model.sinks else None
    new, contexts = zip(*lengths, strict=True)
    batch = AttentionBatch(slots, list(new), list(contexts), tables, size)
    return Step(model, lengths, q, caches[0], caches[1], sinks, batch)


def attend_exactly(step: Step) -> Tensor:  # [num_tokens, heads, v_head_dim] float64
    """The same by whole matrices in float64."""
    model, start, results = step.model, 0, []
    for table, (new, context) in zip(step.batch.block_tables, step.lengths, strict=True):
        blocks = table[: -(-context // model.block_size)]
        group = model.heads // model.kv_heads
        key, value = (
            cache[blocks].flatten(0, 1)[:context].double().repeat_interleave(group, dim=1).transpose(0, 1)
            for cache in (step.k_cache, step.v_cache)
        )
        scores = step.q[start : start + new].double().transpose(0, 1) @ key.mT * SCALE  # [heads, new, context]
        if model.softcap is not None:
            scores = model.softcap * torch.tanh(scores / model.softcap)
        distance = torch.arange(context - new, context)[:, None] - torch.arange(context)
        hidden = (distance < 0) | (distance >= (model.window or context))
        scores = scores.masked_fill(hidden.to(scores.device), float("-inf"))
        if step.sinks is not None:
            sinks = step.sinks.double()[:, None, None].expand(-1, new, 1)
            scores = torch.cat([scores, sinks], dim=2)
        results.append((scores.softmax(dim=2)[..., :context] @ value).transpose(0, 1))
        start += new
    return torch.cat(results)


def run(setting: Setting) -> Iterator[Check]:
    with setting.triton():
        # Speed first: tiles are then chosen for the model that is measured, and checked with the others.
        yield from _decode_speed(setting)
        yield from _prefill_speed(setting)
        yield _fixed_shapes(setting)
        from ..kernels.triton_tuning import without_measuring  # Triton is not installed everywhere

        with without_measuring():  # tiles for every model here would take minutes of compilation
            yield from _every_model(setting)
            yield from _quantised(setting)


def _every_model(setting: Setting) -> Iterator[Check]:
    for name, model in (DRY_MODELS if setting.dry else MODELS).items():
        for dtype in DRY_DTYPES if setting.dry else TOLERANCES:
            step = make_step(model, DRY_LENGTHS if setting.dry else LENGTHS, dtype, setting.device, poison=True)
            named = f"{name}, {str(dtype).removeprefix('torch.')}: equals float64"
            yield _compare(named, step.attend(), attend_exactly(step), TOLERANCES[dtype])


def _compare(name: str, result: Tensor, exact: Tensor, tolerance: float) -> Check:
    difference = (result.double() - exact).abs().max().item()
    return Check(name, ok=difference <= tolerance, value=difference, target=f"<= {tolerance:g}")


def _quantised(setting: Setting) -> Iterator[Check]:
    """Caches in int8 and fp8, which only the GPU's kernels read so far."""
    from ..kernels.attention_triton import KVScales, attend_on_gpu

    name, model = ("tiny", DRY_MODELS["tiny"]) if setting.dry else ("Llama 8B", LLAMA)
    lengths, computed = (DRY_LENGTHS, torch.float32) if setting.dry else (LENGTHS, torch.bfloat16)
    for dtype, largest in ((torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)):
        step = make_step(model, lengths, computed, setting.device, poison=True)
        scales = [cache.float().abs().amax(dim=3) / largest for cache in (step.k_cache, step.v_cache)]
        stored = [
            (cache.float() / scale[..., None]).nan_to_num(largest).round().to(dtype)
            for cache, scale in zip((step.k_cache, step.v_cache), scales, strict=True)
        ]
        result = attend_on_gpu(
            step.q, stored[0], stored[1], step.batch.plan(model.kv_heads),
            scale=SCALE, window=None, softcap=None, sinks=None, scales=KVScales(scales[0], scales[1]),
        )  # fmt: skip
        k, v = (cache.float() * scale[..., None] for cache, scale in zip(stored, scales, strict=True))
        exact = attend_exactly(replace(step, k_cache=k, v_cache=v))
        named = f"{name}, cache in {str(dtype).removeprefix('torch.')}: equals float64"
        yield _compare(named, result, exact, TOLERANCES[computed])


def _fixed_shapes(setting: Setting) -> Check:
    """A captured launch, replayed for other lengths than it was captured with, says what a plain one says."""
    lengths = ((1, 40), (1, 1), (1, 33)) if setting.dry else ((1, 4000), (1, 1), (1, 513), (1, 90))
    dtype = torch.float32 if setting.dry else torch.bfloat16
    step = make_step(DRY_MODELS["tiny"] if setting.dry else LLAMA, lengths, dtype, setting.device, poison=True)
    context_lens = torch.ones(len(lengths), dtype=torch.int64, device=setting.device)
    batch = DecodeBatch(step.batch.slots, context_lens, step.batch.block_tables, step.model.block_size)
    step.attend_decode(DecodeBatch(batch.slots, context_lens, batch.block_tables, batch.block_size))  # compiles
    if setting.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = step.attend_decode(batch)
    context_lens.copy_(torch.tensor([context for _, context in lengths]))
    if setting.device.type == "cuda":
        graph.replay()
    else:
        output = step.attend_decode(batch)
    return Check("replayed for other lengths: the same bits", ok=torch.equal(output, step.attend()))


def _decode_speed(setting: Setting) -> Iterator[Check]:
    ceiling = copy_bytes_per_s(setting.device)
    yield Check("copy ceiling", ok=True, value=ceiling / 1e9, unit="GB/s")
    dtype = torch.float32 if setting.dry else torch.bfloat16
    model = DRY_MODELS["tiny"] if setting.dry else LLAMA
    for (sequences, context), share in (DRY_DECODE_SHARES if setting.dry else DECODE_SHARES).items():
        step = make_step(model, ((1, context),) * sequences, dtype, setting.device, poison=False)
        read = sequences * context * model.kv_heads * (model.k_head_dim + model.v_head_dim) * dtype.itemsize
        reached = read / _seconds_a_call(step, setting)
        yield Check(
            f"decode attention, {sequences} x {context}", ok=True, value=reached / 1e9, unit="GB/s",
            target=f">= {share:.0%} of the copy ceiling", met=None if setting.dry else reached >= share * ceiling,
            note=f"{reached / ceiling:.0%}",
        )  # fmt: skip


def _prefill_speed(setting: Setting) -> Iterator[Check]:
    dtype = torch.float32 if setting.dry else torch.bfloat16
    model = DRY_MODELS["tiny"] if setting.dry else LLAMA
    for new, context in ((20, 20), (20, 50)) if setting.dry else ((8192, 8192), (2048, 32_768)):
        step = make_step(model, ((new, context),), dtype, setting.device, poison=False)
        pairs = new * (context - new) + new * (new + 1) // 2  # of a query and a key
        operations = 2 * pairs * model.heads * (model.k_head_dim + model.v_head_dim)
        reached = operations / _seconds_a_call(step, setting)
        name = f"prefill attention, {new} new of {context}"
        if new < context:
            yield Check(name, ok=True, value=reached / 1e12, unit="TFLOP/s")
            continue
        torchs = operations / _torch_seconds(step, setting)
        yield Check(
            name, ok=True, value=reached / 1e12, unit="TFLOP/s", target=f">= {PREFILL_SHARE:.0%} of torch's attention",
            met=None if setting.dry else reached >= PREFILL_SHARE * torchs,
            note=f"{reached / torchs:.0%} of {torchs / 1e12:.4g}",
        )  # fmt: skip


def _seconds_a_call(step: Step, setting: Setting) -> float:
    calls = 1 if setting.dry else CALLS
    repeat, warm_up = (1, 0) if setting.dry else (REPEAT, WARM_UP)
    return (
        seconds(lambda: [step.attend() for _ in range(calls)], setting.device, repeat=repeat, warm_up=warm_up) / calls
    )


def _torch_seconds(step: Step, setting: Setting) -> float:
    """The same causal attention of one sequence without a prefix by torch, its KV laid out as torch likes it."""
    group = step.model.heads // step.model.kv_heads
    tokens = len(step.q)
    q = step.q.transpose(0, 1)[None].contiguous()
    k, v = (
        cache.flatten(0, 1)[:tokens].repeat_interleave(group, dim=1).transpose(0, 1)[None].contiguous()
        for cache in (step.k_cache, step.v_cache)
    )
    calls = 1 if setting.dry else CALLS
    backends = [SDPBackend.MATH] if setting.device.type == "cpu" else [SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends):
        return (
            seconds(
                lambda: [F.scaled_dot_product_attention(q, k, v, is_causal=True) for _ in range(calls)], setting.device
            )
            / calls
        )
