"""Paged attention behind one interface: `paged_attention` picks the version for the tensors' device."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .attention_cpu import Workspace, attend_decode_on_cpu, attend_on_cpu


@dataclass(frozen=True)
class AttentionBatch:
    """One step, its tokens flattened over sequences in order; the same for every layer.

    Token t of a sequence lives in block `row[t // block_size]` at offset `t % block_size`, `row` being its block table.
    """

    slots: Tensor  # [num_tokens] int64: block * block_size + offset, where each token's KV is written
    query_lens: list[int]  # tokens of this step, per sequence
    context_lens: list[int]  # tokens after this step, per sequence (this step's included)
    block_tables: Tensor  # [num_seqs, max_blocks] int64, padded with 0
    block_size: int
    workspace: Workspace = field(default_factory=Workspace, init=False)  # what the layers of this step share


@dataclass(frozen=True)
class DecodeBatch:
    """One new token of every sequence, in tensors alone: a launch that is captured once runs again on new contents."""

    slots: Tensor  # [rows] int64, where each row's KV is written
    context_lens: Tensor  # [rows] int64, at least 1: tokens of each row after this step
    block_tables: Tensor  # [rows, max_blocks] int64 contiguous; behind a row's last block anything may stand
    block_size: int


def paged_attention(
    q: Tensor,  # [num_tokens, heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,  # a token sees itself and the window - 1 tokens before it
    softcap: float | None,  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None,  # [heads]: a logit per head that takes probability and gives no value
) -> Tensor:  # [num_tokens, heads, v_head_dim]
    """Causal attention of every sequence over its own blocks; this step's KV must already be in the cache.

    Memory of a block beyond the sequence's last token may hold anything, NaN included. The result of a sequence
    does not depend on the others in the batch, nor on where its blocks lie.
    """
    return attend_on_cpu(
        q,
        k_cache,
        v_cache,
        query_lens=batch.query_lens,
        context_lens=batch.context_lens,
        block_tables=batch.block_tables,
        workspace=batch.workspace,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def decode_attention(
    q: Tensor,  # [rows, heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    batch: DecodeBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [rows, heads, v_head_dim]
    """The contract of `paged_attention` for a batch whose every row is one token, read from tensors only."""
    return attend_decode_on_cpu(
        q,
        k_cache,
        v_cache,
        context_lens=batch.context_lens,
        block_tables=batch.block_tables,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
