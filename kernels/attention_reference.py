"""Paged attention by its definition: slow, plain, any dtype (float64 too). Every other version is tested against it."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_by_definition(
    query: Tensor,  # [query_len, heads, k_head_dim], the last query_len tokens of the context
    key: Tensor,  # [context_len, kv_heads, k_head_dim]
    value: Tensor,  # [context_len, kv_heads, v_head_dim]
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]: a logit per head that takes probability and gives no value
) -> Tensor:  # [query_len, heads, v_head_dim]
    """Causal attention of one sequence, one query and one head at a time.

    The query at position p sees keys at positions max(0, p - window + 1) .. p (from 0 without a window).
    """
    query_len, heads, _ = query.shape
    context_len, kv_heads, v_head_dim = value.shape
    output = query.new_empty(query_len, heads, v_head_dim)
    for row in range(query_len):
        position = context_len - query_len + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            kv_head = head * kv_heads // heads
            scores = key[first : position + 1, kv_head] @ query[row, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].to(scores.dtype)])
            probabilities = torch.softmax(scores, dim=0)[: position + 1 - first]
            output[row, head] = probabilities @ value[first : position + 1, kv_head]
    return output


def paged_attention_reference(
    query: Tensor,  # [num_tokens, heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    *,
    query_lens: list[int],
    context_lens: list[int],
    block_tables: Tensor,  # [num_seqs, max_blocks] int64
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [num_tokens, heads, v_head_dim]
    """Attention of several flattened sequences over their blocks, token by token."""
    block_size = k_cache.shape[1]
    outputs, start = [], 0
    for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        places = [
            (int(block_tables[sequence, token // block_size]), token % block_size) for token in range(context_len)
        ]
        key = torch.stack([k_cache[block, offset] for block, offset in places])
        value = torch.stack([v_cache[block, offset] for block, offset in places])
        outputs.append(
            attend_by_definition(
                query[start : start + query_len],
                key,
                value,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        )
        start += query_len
    return torch.cat(outputs)
