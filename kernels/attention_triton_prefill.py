"""The kernel for chunks of a prompt: causal attention of new tokens over what is cached and themselves.

A program takes a tile of one sequence's queries for one KV head. Rows of a tile are (token, head of the group) pairs,
so no row is wasted whatever the group's size, and a key is read once for the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_triton_decode import LOG2_E
from .attention_triton_tile import attend_range

TILE_FIELDS = 5  # of a row of `tiles`

_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit(do_not_specialize=["window", "max_blocks"])
def attend_tiles(
    q,  # [num_tokens, heads, k_head_dim]
    k_cache,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache,  # [num_blocks, block_size, kv_heads, v_head_dim]
    k_scales,  # [num_blocks, block_size, kv_heads] float32
    v_scales,
    sinks,  # [heads]
    output,  # [num_tokens, heads, v_head_dim], written
    tiles,  # [num_tiles, TILE_FIELDS] int32: row of block_tables, first token, query_len, context_len, first row
    block_tables,  # [num_seqs, max_blocks] integers
    max_blocks,
    q_token_stride,
    q_head_stride,
    score_scale,
    score_cap,
    window,
    SINKS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a tile and KV head."""
    tile = tiles + tl.program_id(0) // KV_HEADS * _TILE_FIELDS
    kv_head = tl.program_id(0) % KV_HEADS
    table = block_tables + tl.load(tile).to(tl.int64) * max_blocks
    first_token = tl.load(tile + 1)
    query_len = tl.load(tile + 2)
    context_len = tl.load(tile + 3)
    first_row = tl.load(tile + 4)

    rows = first_row + tl.arange(0, M)
    tokens = rows // GROUP  # within the sequence's new ones
    heads = kv_head * GROUP + rows % GROUP
    exists = tokens < query_len
    cached = context_len - query_len
    positions = cached + tokens
    k_dims = tl.arange(0, K_PAD)
    at = q + (first_token + tokens).to(tl.int64) * q_token_stride + heads * q_head_stride
    q_mask = exists[:, None] & (k_dims < K_DIM)[None, :]
    queries = tl.load(at[:, None] + k_dims[None, :], mask=q_mask, other=0)

    # Keys in the order they are read: those at the window's edge, those that every row sees, those on the diagonal.
    first_position = cached + first_row // GROUP
    last_position = tl.minimum(cached + (first_row + M - 1) // GROUP, context_len - 1)
    end = last_position + 1
    diagonal = (first_position + 1) // BLOCK_N * BLOCK_N
    start = 0
    seen_by_all = 0
    if WINDOWED:
        start = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        seen_by_all = (tl.maximum(last_position - window + 1, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        seen_by_all = tl.minimum(seen_by_all, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        diagonal = tl.maximum(diagonal, seen_by_all)
    mixed = tl.zeros([M, V_PAD], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if WINDOWED:
        mixed, peak, total = attend_range(
            queries, mixed, peak, total, start, tl.minimum(seen_by_all, end), positions, kv_head,
            table, k_cache, v_cache, k_scales, v_scales, score_scale, score_cap, window,
            True, WINDOWED, CAPPED, SCALED, KV_HEADS, K_DIM, V_DIM, K_PAD, V_PAD, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    mixed, peak, total = attend_range(
        queries, mixed, peak, total, seen_by_all, diagonal, positions, kv_head,
        table, k_cache, v_cache, k_scales, v_scales, score_scale, score_cap, window,
        False, False, CAPPED, SCALED, KV_HEADS, K_DIM, V_DIM, K_PAD, V_PAD, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    mixed, peak, total = attend_range(
        queries, mixed, peak, total, diagonal, end, positions, kv_head,
        table, k_cache, v_cache, k_scales, v_scales, score_scale, score_cap, window,
        True, WINDOWED, CAPPED, SCALED, KV_HEADS, K_DIM, V_DIM, K_PAD, V_PAD, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    if SINKS:
        total += tl.exp2(tl.load(sinks + heads, mask=exists, other=0).to(tl.float32) * _LOG2_E - peak)
    v_dims = tl.arange(0, V_PAD)
    out = output + ((first_token + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads) * V_DIM
    mask = exists[:, None] & (v_dims < V_DIM)[None, :]
    tl.store(out[:, None] + v_dims[None, :], (mixed / total[:, None]).to(output.dtype.element_ty), mask=mask)
