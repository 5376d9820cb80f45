"""Paged attention in C: K and V are read in place, without a gather.

Single new tokens (`native/attention.c`) are bound by memory, chunks of a prompt (`native/prompt_attention.c`) by
arithmetic, so each has a kernel of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kv_int8 import Scales
from .library import native

CACHE_DTYPES = (torch.float32, torch.int8)
MOST_DIMS = 1024  # of K and V together: a tile of queries lies on a thread's stack


class _CPagedLayer(ctypes.Structure):
    """`PagedLayer` of native/paged.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "k_scales", "v_scales", "sinks")),
        *((name, ctypes.c_int64) for name in ("block_size", "heads", "kv_heads", "k_dim", "v_dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class _CSequences(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "table_stride")),
        *((name, ctypes.c_void_p) for name in ("starts", "query_lens", "context_lens", "tables")),
    )


Part = tuple[int, int, int, int]  # start, query_len, context_len, sequence


class _CStep(ctypes.Structure):
    _fields_ = (("singles", _CSequences), ("chunks", _CSequences))


@dataclass(frozen=True)
class PagedLayer:
    """One layer's caches and the settings of its attention, as C reads them."""

    library: ctypes.CDLL
    pointer: int
    kept: tuple[object, ...]  # what the pointer points to, directly or not


@dataclass(frozen=True)
class NativeStep:
    """The sequences of a step, as C reads them; the same for every layer."""

    pointer: int
    kept: tuple[object, ...]


def native_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,  # [num_seqs, max_blocks] int64
    of_prompts: Sequence[int | None] = (),  # per sequence, see `AttentionBatch`
) -> NativeStep:
    singles: list[Part] = []
    chunks: list[Part] = []
    start = 0
    for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        read = of_prompts[sequence] if of_prompts else None
        if read is None:
            read = 0 if query_len == 1 else query_len
        if read:
            chunks.append((start, read, context_len - query_len + read, sequence))
        for i in range(read, query_len):
            singles.append((start + i, 1, context_len - query_len + i + 1, sequence))
        start += query_len
    kept: list[object] = []

    def pick(parts: list[Part]) -> _CSequences:
        if not parts:
            return _CSequences()
        *lens, chosen = torch.tensor(parts, dtype=torch.int64).T.contiguous()
        same = [part[3] for part in parts] == list(range(len(query_lens)))
        tables = block_tables if same else block_tables[chosen]
        tables = tables.contiguous()
        kept.extend((lens, tables))
        return _CSequences(len(parts), tables.shape[1], *(row.data_ptr() for row in lens), tables.data_ptr())

    step = _CStep(pick(singles), pick(chunks))
    return NativeStep(ctypes.addressof(step), (step, *kept))


def library_for(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> ctypes.CDLL | None:
    """The kernels in C, if these tensors are for them: float32 (caches also int8), on the CPU, caches contiguous."""
    if q.dtype != torch.float32 or k_cache.dtype != v_cache.dtype or k_cache.dtype not in CACHE_DTYPES:
        return None
    if not (q.is_cpu and k_cache.is_cpu and v_cache.is_cpu):
        return None
    if k_cache.shape[3] + v_cache.shape[3] > MOST_DIMS:
        return None
    return native() if k_cache.is_contiguous() and v_cache.is_contiguous() else None


def paged_layer(
    library: ctypes.CDLL,
    heads: int,
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    scales: Scales | None = None,  # of int8 caches
    *,
    scale: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
) -> PagedLayer:
    """For caches that `library_for` accepts."""
    assert (k_cache.dtype == torch.int8) == (scales is not None), "int8 comes with scales"
    if sinks is not None:
        sinks = sinks.float().contiguous()
    _, block_size, kv_heads, k_head_dim = k_cache.shape
    k_scales, v_scales = (None, None) if scales is None else (part.data_ptr() for part in scales)
    layer = _CPagedLayer(
        k_cache.data_ptr(), v_cache.data_ptr(), k_scales, v_scales, None if sinks is None else sinks.data_ptr(),
        block_size, heads, kv_heads, k_head_dim, v_cache.shape[3], window or 0, scale, softcap or 0.0,
    )  # fmt: skip
    return PagedLayer(library, ctypes.addressof(layer), (layer, k_cache, v_cache, scales, sinks))


def attend_in_c(
    layer: PagedLayer,
    step: NativeStep,
    q: Tensor,  # [num_tokens, heads, k_head_dim]
    v_head_dim: int,
) -> Tensor:  # [num_tokens, heads, v_head_dim] contiguous
    """The contract of `paged_attention`."""
    num_tokens, heads, k_head_dim = q.shape
    if q.stride()[1:] != (k_head_dim, 1):
        q = q.contiguous()
    output = q.new_empty(num_tokens, heads, v_head_dim)
    layer.library.pd_attend(layer.pointer, step.pointer, q.data_ptr(), q.stride(0), output.data_ptr())
    return output
