"""Paged attention behind one interface: `paged_attention` picks the version for the tensors' device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .attention_cpu import Workspace, attend_decode_on_cpu, attend_on_cpu
from .attention_native import NativeStep, native_step
from .attention_plan import GpuPlan, default_num_splits, plan_fixed, plan_step
from .kv_int8 import Scales
from .triton_choice import in_triton


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
    # Per sequence: how many tokens of this step are its prompt's; None: all, unless it is one. Even one of them alone
    # goes the way of several (in C), and each of the others that of one: so it does not show what of a prompt is
    # cached, how it was cut, or whether output is recomputed. Rounding hardly would; what is quantised after it may.
    of_prompts: Sequence[int | None] = ()
    workspace: Workspace = field(default_factory=Workspace, init=False)  # what the layers of this step share
    plans: dict[int, GpuPlan] = field(default_factory=dict, init=False)  # the same, on a GPU, by number of KV heads

    def native_step(self) -> NativeStep:
        if self.workspace.native is None:
            self.workspace.native = native_step(
                self.query_lens, self.context_lens, self.block_tables, self.of_prompts
            )
        return self.workspace.native

    def plan(self, kv_heads: int) -> GpuPlan:
        if kv_heads not in self.plans:
            num_splits = default_num_splits(self.block_tables.device, kv_heads)
            self.plans[kv_heads] = plan_step(self.query_lens, self.context_lens, self.block_tables, num_splits)
        return self.plans[kv_heads]


@dataclass(frozen=True)
class DecodeBatch:
    """One new token of every sequence, in tensors alone: a launch that is captured once runs again on new contents.

    What a step's first layer prepares on a GPU must be captured too: capture with a batch that was not used before.
    """

    slots: Tensor  # [rows] int64, where each row's KV is written
    context_lens: Tensor  # [rows] int64, at least 1: tokens of each row after this step
    block_tables: Tensor  # [rows, max_blocks] int64 contiguous; behind a row's last block anything may stand
    block_size: int
    plans: dict[int, GpuPlan] = field(default_factory=dict, init=False)  # on a GPU, by number of KV heads

    def plan(self, kv_heads: int) -> GpuPlan:
        if kv_heads not in self.plans:
            num_splits = default_num_splits(self.block_tables.device, kv_heads)
            self.plans[kv_heads] = plan_fixed(self.context_lens, self.block_tables, self.block_size, num_splits)
        return self.plans[kv_heads]


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
    scales: Scales | None = None,  # of int8 caches, which only a CPU has
) -> Tensor:  # [num_tokens, heads, v_head_dim]
    """Causal attention of every sequence over its own blocks; this step's KV must already be in the cache.

    Memory of a block beyond the sequence's last token may hold anything, NaN included. The result of a sequence
    does not depend on the others in the batch, nor on where its blocks lie.
    """
    if in_triton(q):
        from .attention_triton import attend_on_gpu  # not installed, and not wanted, where there is no GPU

        plan = batch.plan(k_cache.shape[2])
        return attend_on_gpu(q, k_cache, v_cache, plan, scale=scale, window=window, softcap=softcap, sinks=sinks)
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
        scales=scales,
        of_prompts=batch.of_prompts,
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
    if in_triton(q):
        from .attention_triton import attend_on_gpu

        plan = batch.plan(k_cache.shape[2])
        return attend_on_gpu(q, k_cache, v_cache, plan, scale=scale, window=window, softcap=softcap, sinks=sinks)
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
