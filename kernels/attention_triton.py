"""Paged attention on a GPU, in Triton: what is launched, with which tiles, and how tiles are chosen.

A step's single tokens and its chunks of several are two kernels (`attention_triton_decode`, `attention_triton_prefill`)
that write their rows of one output. What a layer needs beyond its own tensors is in the step's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor

from .attention_plan import GpuPlan, SingleTokens, Splits, default_num_splits, num_programs, plan_step
from .attention_triton_decode import LOG2_E, attend_splits, combine_splits, list_splits
from .attention_triton_prefill import attend_tiles
from .triton_tuning import Tiles, choose

NO_WINDOW = 1 << 30
MIN_PAD = 16  # the least that a matrix product takes
COMBINED_SPLITS = 16  # at a time
MAX_GROUP = 128  # heads that share a KV head; more would not fit a program
QUANTISED = (torch.int8, torch.float8_e4m3fn)

# The first of each is the most modest: it is taken where nothing can be measured.
DECODE_TILES = [
    Tiles(0, keys, warps, stages)
    for keys, warps, stages in ((32, 4, 2), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 8, 3))
]
PREFILL_TILES = [
    Tiles(rows, keys, warps, stages)
    for rows, keys, warps, stages in (
        (64, 32, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2)
    )
]  # fmt: skip
# Float32 products are not made by tensor cores, and take many registers.
PREFILL_TILES_FLOAT32 = [Tiles(32, 32, 4, 1), Tiles(64, 32, 8, 1), Tiles(32, 64, 8, 1)]

# What tiles are chosen by.
TUNING_SEQUENCES, TUNING_TOKENS = 32, 4096


@dataclass(frozen=True)
class KVScales:
    """What the values of a quantised cache are to be multiplied with, per token and KV head."""

    k: Tensor  # [num_blocks, block_size, kv_heads] float32
    v: Tensor  # the same


@dataclass(frozen=True)
class _Layer:
    """One layer's attention, checked and ready to launch."""

    q: Tensor  # [num_tokens, heads, k_head_dim], contiguous along k_head_dim
    k_cache: Tensor  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor  # [num_blocks, block_size, kv_heads, v_head_dim]
    scales: KVScales | None
    sinks: Tensor | None  # [heads]
    scale: float
    window: int | None
    softcap: float | None
    output: Tensor  # [num_tokens, heads, v_head_dim]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[2]

    @property
    def caches(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """K, V and their scales; where there are none, something that is not read."""
        if self.scales is None:
            return self.k_cache, self.v_cache, self.k_cache, self.v_cache
        return self.k_cache, self.v_cache, self.scales.k, self.scales.v

    @property
    def numbers(self) -> tuple[int, int, float, float, int]:
        """Strides of q, then how a product becomes a score, in units of log2, and the window."""
        window = self.window or NO_WINDOW
        if self.softcap is None:
            return self.q.stride(0), self.q.stride(1), self.scale * LOG2_E, 1.0, window
        return self.q.stride(0), self.q.stride(1), self.scale / self.softcap, self.softcap * LOG2_E, window

    @property
    def constants(self) -> dict[str, int | bool]:
        """What the kernels are compiled for."""
        block_size, kv_heads, k_dim = self.k_cache.shape[1:]
        v_dim = self.v_cache.shape[3]
        return {
            "WINDOWED": self.window is not None,
            "CAPPED": self.softcap is not None,
            "SCALED": self.scales is not None,
            "KV_HEADS": kv_heads,
            "GROUP": self.group,
            "K_DIM": k_dim,
            "V_DIM": v_dim,
            "K_PAD": _padded(k_dim),
            "V_PAD": _padded(v_dim),
            "BLOCK_SIZE": block_size,
        }


def _padded(size: int) -> int:
    return max(MIN_PAD, int(triton.next_power_of_2(size)))


def attend_on_gpu(
    q: Tensor,  # [num_tokens, heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    plan: GpuPlan,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
    scales: KVScales | None = None,
) -> Tensor:  # [num_tokens, heads, v_head_dim]
    """The contract of `paged_attention`; a cache in int8 or float8 e4m3 comes with its scales.

    Rows of padding (`SingleTokens.context_lens` of 0) become zeros.
    """
    assert k_cache.is_contiguous(), "K is read by the shape of its cache"
    assert v_cache.is_contiguous(), "V is read by the shape of its cache"
    assert (k_cache.dtype in QUANTISED) == (scales is not None), f"scales do not fit a cache of {k_cache.dtype}"
    assert q.shape[1] % k_cache.shape[2] == 0, "each KV head serves the same number of heads"
    output = q.new_empty(*q.shape[:2], v_cache.shape[3])
    q = q if q.stride(2) == 1 else q.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    layer = _Layer(q, k_cache, v_cache, scales, sinks, scale, window, softcap, output)
    assert layer.group <= MAX_GROUP, f"{layer.group} heads share a KV head, at most {MAX_GROUP} can"
    if plan.singles is not None:
        _attend_singles(layer, plan.singles, _decode_tiles(layer))
    if plan.chunks:
        _attend_chunks(layer, plan, _prefill_tiles(layer))
    return output


def _splits(singles: SingleTokens, window: int) -> Splits:
    """The list of splits for a window: made by the first layer of a step that has it."""
    if window not in singles.splits:
        num_seqs, device = len(singles.rows), singles.rows.device
        splits = Splits(
            torch.empty(num_seqs + 1, dtype=torch.int32, device=device),
            torch.empty(singles.max_listed, dtype=torch.int32, device=device),
        )
        list_splits[(num_seqs,)](
            singles.context_lens, splits.first_splits, splits.split_seqs, num_seqs, singles.num_splits, window,
            SEQS=128,
        )  # fmt: skip
        singles.splits[window] = splits
    return singles.splits[window]


def _attend_singles(layer: _Layer, singles: SingleTokens, tiles: Tiles) -> None:
    splits = _splits(singles, layer.window or NO_WINDOW)
    v_dim = layer.v_cache.shape[3]
    partial, partial_sums = singles.partial(layer.heads, v_dim)
    constants = layer.constants
    attend_splits[(num_programs(layer.q.device),)](
        layer.q, *layer.caches, partial, partial_sums,
        singles.rows, singles.context_lens, singles.block_tables, splits.first_splits, splits.split_seqs,
        len(singles.rows), singles.block_tables.stride(0), *layer.numbers,
        **constants, M=_padded(layer.group), BLOCK_N=tiles.keys, **tiles.launch,
    )  # fmt: skip
    combine_splits[(len(singles.rows), layer.heads)](
        partial, partial_sums, partial_sums if layer.sinks is None else layer.sinks, layer.output,
        singles.rows, splits.first_splits,
        SINKS=layer.sinks is not None, HEADS=layer.heads, V_DIM=v_dim, V_PAD=constants["V_PAD"], SPLITS=COMBINED_SPLITS,
        num_warps=2,
    )  # fmt: skip


def _attend_chunks(layer: _Layer, plan: GpuPlan, tiles: Tiles) -> None:
    listed = plan.tiles_of(tiles.rows, layer.group)
    attend_tiles[(len(listed) * layer.k_cache.shape[2],)](
        layer.q, *layer.caches, layer.q if layer.sinks is None else layer.sinks, layer.output,
        listed, plan.block_tables, plan.block_tables.stride(0), *layer.numbers,
        SINKS=layer.sinks is not None, **layer.constants, M=tiles.rows, BLOCK_N=tiles.keys, **tiles.launch,
    )  # fmt: skip


def _decode_tiles(layer: _Layer) -> Tiles:
    def prepare() -> Callable[[Tiles], None]:
        probe, plan = _probe(layer, [1] * TUNING_SEQUENCES, [TUNING_TOKENS] * TUNING_SEQUENCES)
        assert plan.singles is not None
        return partial(_attend_singles, probe, plan.singles)

    return choose(("decode", *_shape(layer)), DECODE_TILES, layer.q.device, prepare)


def _prefill_tiles(layer: _Layer) -> Tiles:
    def prepare() -> Callable[[Tiles], None]:
        return partial(_attend_chunks, *_probe(layer, [TUNING_TOKENS // 2], [TUNING_TOKENS]))

    candidates = PREFILL_TILES_FLOAT32 if layer.q.dtype == torch.float32 else PREFILL_TILES
    return choose(("prefill", *_shape(layer)), candidates, layer.q.device, prepare)


def _shape(layer: _Layer) -> tuple[Hashable, ...]:
    """All that tiles depend on; a window only changes how many of them there are."""
    constants = layer.constants
    del constants["WINDOWED"], constants["CAPPED"]
    return layer.q.device, layer.q.dtype, layer.k_cache.dtype, tuple(constants.values())


def _probe(layer: _Layer, query_lens: list[int], context_lens: list[int]) -> tuple[_Layer, GpuPlan]:
    """A step to measure on the layer's own cache, whatever that holds; its blocks are read in shuffled order."""
    device, num_blocks, block_size = layer.q.device, *layer.k_cache.shape[:2]
    columns = -(-max(context_lens) // block_size)
    tables = torch.randint(num_blocks, (len(context_lens), columns), dtype=torch.int32, device=device)
    q = torch.randn(sum(query_lens), *layer.q.shape[1:], dtype=layer.q.dtype, device=device)
    output = layer.output.new_empty(len(q), *layer.output.shape[1:])
    splits = default_num_splits(device, layer.k_cache.shape[2])
    probe = replace(layer, q=q, output=output, window=None)
    return probe, plan_step(query_lens, context_lens, tables, splits)
