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

from .library import native

MOST_DIMS = 2048  # of K and V together: a tile of queries lies on a thread's stack


@dataclass(frozen=True)
class _Sequences:
    """Sequences of a step, as C reads them."""

    starts: Tensor  # [sequences] int64: their first tokens in the flattened batch
    query_lens: Tensor  # [sequences] int64: their tokens of this step
    context_lens: Tensor  # [sequences] int64: their tokens after this step
    tables: Tensor  # [sequences, max_blocks] int64


@dataclass(frozen=True)
class NativePlan:
    """The sequences of a step, the same for every layer: those with one query, and the others."""

    singles: _Sequences | None
    chunks: _Sequences | None


def plan_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,  # [num_seqs, max_blocks] int64
) -> NativePlan:
    singles: list[int] = []
    chunks: list[int] = []
    starts: list[int] = []
    start = 0
    for sequence, query_len in enumerate(query_lens):
        (singles if query_len == 1 else chunks).append(sequence)
        starts.append(start)
        start += query_len
    table = torch.tensor([starts, query_lens, context_lens], dtype=torch.int64)

    def pick(chosen: list[int]) -> _Sequences | None:
        if not chosen:
            return None
        whole = len(chosen) == len(starts)
        lens, tables = (table, block_tables) if whole else (table[:, chosen], block_tables[chosen])
        first, queries, contexts = lens.contiguous().unbind()
        return _Sequences(first, queries, contexts, tables.contiguous())

    return NativePlan(pick(singles), pick(chunks))


def library_for(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> ctypes.CDLL | None:
    """The kernels in C, if these tensors are for them: float32, on the CPU, the caches contiguous."""
    for tensor in (q, k_cache, v_cache):
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            return None
    if k_cache.shape[3] + v_cache.shape[3] > MOST_DIMS:
        return None
    return native() if k_cache.is_contiguous() and v_cache.is_contiguous() else None


def attend_in_c(
    library: ctypes.CDLL,
    q: Tensor,  # [num_tokens, heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    plan: NativePlan,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [num_tokens, heads, v_head_dim] contiguous
    """The contract of `paged_attention`."""
    num_tokens, heads, k_head_dim = q.shape
    _, block_size, kv_heads, v_head_dim = v_cache.shape
    if q.stride()[1:] != (k_head_dim, 1):
        q = q.contiguous()
    if sinks is not None:
        sinks = sinks.float().contiguous()
    output = q.new_empty(num_tokens, heads, v_head_dim)
    inputs = q.data_ptr(), q.stride(0), k_cache.data_ptr(), v_cache.data_ptr()
    shapes = block_size, heads, kv_heads, k_head_dim, v_head_dim
    settings = scale, window or 0, softcap or 0.0, None if sinks is None else sinks.data_ptr()
    if (part := plan.singles) is not None:
        state = q.new_empty(len(part.starts), 2, heads)
        library.pd_decode_attention(
            *inputs, len(part.starts), part.starts.data_ptr(), part.context_lens.data_ptr(), part.tables.data_ptr(),
            part.tables.shape[1], *shapes, *settings, state.data_ptr(), output.data_ptr(),
        )  # fmt: skip
    if (part := plan.chunks) is not None:
        library.pd_prompt_attention(
            *inputs, len(part.starts), part.starts.data_ptr(), part.query_lens.data_ptr(), part.context_lens.data_ptr(),
            part.tables.data_ptr(), part.tables.shape[1], *shapes, *settings, output.data_ptr(),
        )  # fmt: skip
    return output
