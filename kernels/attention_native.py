"""Attention of single new tokens in C (`native/attention.c`): K and V are read once, in place, without a gather."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .library import native


@dataclass(frozen=True)
class SingleTokens:
    """The sequences of a step that have one query each; the same for every layer."""

    rows: Tensor  # [sequences] int64: their tokens in the flattened batch
    lens: Tensor  # [sequences] int64: their tokens after this step
    tables: Tensor  # [sequences, max_blocks] int64


def find_single_tokens(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,  # [num_seqs, max_blocks] int64
) -> SingleTokens:
    rows, sequences, row = [], [], 0
    for sequence, query_len in enumerate(query_lens):
        if query_len == 1:
            rows.append(row)
            sequences.append(sequence)
        row += query_len
    chosen = block_tables if len(sequences) == len(query_lens) else block_tables[sequences]
    lens = torch.tensor([context_lens[sequence] for sequence in sequences], dtype=torch.int64)
    return SingleTokens(torch.tensor(rows, dtype=torch.int64), lens, chosen.contiguous())


def library_for(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> ctypes.CDLL | None:
    """The kernels in C, if these tensors are for them: float32, on the CPU, the caches contiguous."""
    for tensor in (q, k_cache, v_cache):
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            return None
    return native() if k_cache.is_contiguous() and v_cache.is_contiguous() else None


def attend_single_tokens(
    library: ctypes.CDLL,
    q: Tensor,  # [num_tokens, heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    singles: SingleTokens,
    output: Tensor,  # [num_tokens, heads, v_head_dim] contiguous: the rows of `singles` are written
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> None:
    """The contract of `paged_attention`, for those rows."""
    _, heads, k_head_dim = q.shape
    _, block_size, kv_heads, v_head_dim = v_cache.shape
    if q.stride()[1:] != (k_head_dim, 1):
        q = q.contiguous()
    if sinks is not None:
        sinks = sinks.float().contiguous()
    state = q.new_empty(len(singles.rows), 2, heads)
    library.pd_decode_attention(
        q.data_ptr(), q.stride(0), k_cache.data_ptr(), v_cache.data_ptr(),
        len(singles.rows), singles.rows.data_ptr(), singles.lens.data_ptr(),
        singles.tables.data_ptr(), singles.tables.shape[1], block_size, heads, kv_heads, k_head_dim, v_head_dim,
        scale, window or 0, softcap or 0.0, None if sinks is None else sinks.data_ptr(),
        state.data_ptr(), output.data_ptr(),
    )  # fmt: skip
