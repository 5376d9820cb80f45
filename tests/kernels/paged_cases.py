"""Random sequences over a paged cache, and what attention over them should be."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.attention import AttentionBatch
from pdserve.kernels.attention_reference import paged_attention_reference


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    k_head_dim: int = 16
    v_head_dim: int = 16
    block_size: int = 16
    query_lens: tuple[int, ...] = (1, 7, 1)
    context_lens: tuple[int, ...] = (33, 29, 1)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32


@dataclass
class Inputs:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch
    sinks: Tensor | None


def make(case: Case, seed: int = 0) -> Inputs:
    """Random sequences over shuffled blocks; everything that is not a token of theirs is NaN."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    block_size = case.block_size
    used = [-(-length // block_size) for length in case.context_lens]
    num_blocks = sum(used) + 3
    free = rng.sample(range(num_blocks), num_blocks)
    tables = torch.zeros(len(used), max(used), dtype=torch.int64)
    k_cache = torch.full((num_blocks, block_size, case.kv_heads, case.k_head_dim), float("nan"), dtype=case.dtype)
    v_cache = torch.full((num_blocks, block_size, case.kv_heads, case.v_head_dim), float("nan"), dtype=case.dtype)
    slots = []
    for row, (num, length, query_len) in enumerate(zip(used, case.context_lens, case.query_lens, strict=True)):
        blocks = [free.pop() for _ in range(num)]
        tables[row, :num] = torch.tensor(blocks)
        places = torch.tensor([blocks[t // block_size] * block_size + t % block_size for t in range(length)])
        for cache in (k_cache, v_cache):
            values = torch.randn(length, *cache.shape[2:], generator=generator)
            cache.view(-1, *cache.shape[2:])[places] = values.to(case.dtype)
        slots.append(places[length - query_len :])
    q = torch.randn(sum(case.query_lens), case.heads, case.k_head_dim, generator=generator).to(case.dtype)
    sinks = torch.randn(case.heads, generator=generator) if case.sinks else None
    batch = AttentionBatch(
        slots=torch.cat(slots),
        query_lens=list(case.query_lens),
        context_lens=list(case.context_lens),
        block_tables=tables,
        block_size=block_size,
    )
    return Inputs(q, k_cache, v_cache, batch, sinks)


def expected(case: Case, inputs: Inputs) -> Tensor:
    return paged_attention_reference(
        inputs.q.double(),
        inputs.k_cache.double(),
        inputs.v_cache.double(),
        query_lens=list(case.query_lens),
        context_lens=list(case.context_lens),
        block_tables=inputs.batch.block_tables,
        scale=0.3,
        window=case.window,
        softcap=case.softcap,
        sinks=None if inputs.sinks is None else inputs.sinks.double(),
    )
