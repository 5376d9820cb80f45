"""Kernels for one new token per sequence: each sequence's keys are cut into splits, the splits' results combined.

1. `list_splits` (once a step) counts the splits of each sequence, and lists all of them.
2. `attend_splits` works the list off: a fixed number of programs, each taking every n-th (split, KV head). No launch
   depends on a length, the work is even between long and short sequences, and a single long one fills the chip.
3. `combine_splits` weighs the splits of a sequence and a head together.

How a sequence is split depends on its own length alone, and so do the bits of its result. A sequence of length 0 is
padding: it has no split, nothing is read for it, and its output is zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_triton_tile import attend_range

PART_KEYS = 128  # splits begin at multiples of this; tiles of keys must divide it
MIN_PARTS = 4  # of a split of a long sequence: each split costs a write and a read of partial results
FEW_SPLITS = 4  # that a short sequence is cut into all the same: alone, it would wait for one program
LOG2_E = 1.4426950408889634

_PART_KEYS = tl.constexpr(PART_KEYS)
_MIN_PARTS = tl.constexpr(MIN_PARTS)
_FEW_SPLITS = tl.constexpr(FEW_SPLITS)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def visible_parts(context_len, window):
    """The first part with a key that the newest token sees, and how many parts there are from there on."""
    first = tl.maximum(context_len - window, 0) // _PART_KEYS
    return first, (context_len + _PART_KEYS - 1) // _PART_KEYS - first


@triton.jit
def count_splits(context_len, num_splits, window):
    _, parts = visible_parts(context_len, window)
    enough = tl.maximum((parts + _MIN_PARTS - 1) // _MIN_PARTS, tl.minimum(parts, _FEW_SPLITS))
    return tl.minimum(enough, num_splits)


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "window"])
def list_splits(
    context_lens,  # [num_seqs] integers
    first_splits,  # [num_seqs + 1] int32, written: where each sequence's splits begin in the list; its length
    split_seqs,  # [max_listed] int32, written: each split's sequence
    num_seqs,
    num_splits,  # the most that a sequence gets
    window,
    SEQS: tl.constexpr,  # counted at a time
):
    """One program a sequence."""
    seq = tl.program_id(0)
    first = 0
    for start in range(0, seq, SEQS):
        seqs = start + tl.arange(0, SEQS)
        lens = tl.load(context_lens + seqs, mask=seqs < seq, other=0).to(tl.int32)
        first += tl.sum(count_splits(lens, num_splits, window), 0)
    count = count_splits(tl.load(context_lens + seq).to(tl.int32), num_splits, window)
    tl.store(first_splits + seq, first)
    if seq == num_seqs - 1:
        tl.store(first_splits + num_seqs, first + count)
    for start in range(0, count, 32):
        split = start + tl.arange(0, 32)
        tl.store(split_seqs + first + split, tl.zeros([32], tl.int32) + seq, mask=split < count)


@triton.jit(do_not_specialize=["num_seqs", "window", "max_blocks"])
def attend_splits(
    q,  # [num_tokens, heads, k_head_dim]
    k_cache,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache,  # [num_blocks, block_size, kv_heads, v_head_dim]
    k_scales,  # [num_blocks, block_size, kv_heads] float32
    v_scales,
    partial,  # [max_listed, heads, v_head_dim] float32, written: each split's result
    partial_sums,  # [max_listed, heads] float32, written: log2 of its sum of exponentials
    rows,  # [num_seqs] int32: each sequence's row of q
    context_lens,  # [num_seqs] integers
    block_tables,  # [num_seqs, max_blocks] integers
    first_splits,
    split_seqs,
    num_seqs,
    max_blocks,
    q_token_stride,
    q_head_stride,
    score_scale,
    score_cap,
    window,
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
    M: tl.constexpr,  # GROUP rounded up to what a matrix product takes
    BLOCK_N: tl.constexpr,
):
    group = tl.arange(0, M)
    k_dims = tl.arange(0, K_PAD)
    v_dims = tl.arange(0, V_PAD)
    listed = tl.load(first_splits + num_seqs)
    for work in range(tl.program_id(0), listed * KV_HEADS, tl.num_programs(0)):
        place = work // KV_HEADS  # neighbours read the heads of the same tokens
        kv_head = work % KV_HEADS
        seq = tl.load(split_seqs + place)
        first_split = tl.load(first_splits + seq)
        splits = tl.load(first_splits + seq + 1) - first_split
        split = place - first_split
        context_len = tl.load(context_lens + seq).to(tl.int32)
        first_part, parts = visible_parts(context_len, window)
        start = (first_part + split * parts // splits) * _PART_KEYS
        end = tl.minimum((first_part + (split + 1) * parts // splits) * _PART_KEYS, context_len)
        # No tile may lie before the window as a whole.
        start = tl.maximum(start, tl.maximum(context_len - window, 0) // BLOCK_N * BLOCK_N)

        heads = kv_head * GROUP + group
        q_row = q + tl.load(rows + seq).to(tl.int64) * q_token_stride
        q_mask = (group < GROUP)[:, None] & (k_dims < K_DIM)[None, :]
        queries = tl.load(q_row + heads[:, None] * q_head_stride + k_dims[None, :], mask=q_mask, other=0)
        mixed, peak, total = attend_range(
            queries, tl.zeros([M, V_PAD], tl.float32), tl.full([M], float("-inf"), tl.float32),
            tl.zeros([M], tl.float32), start, end, tl.zeros([M], tl.int32) + context_len - 1, kv_head,
            block_tables + seq.to(tl.int64) * max_blocks, k_cache, v_cache, k_scales, v_scales,
            score_scale, score_cap, window,
            True, WINDOWED, CAPPED, SCALED, KV_HEADS, K_DIM, V_DIM, K_PAD, V_PAD, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip

        result = place.to(tl.int64) * (KV_HEADS * GROUP) + heads
        mask = (group < GROUP)[:, None] & (v_dims < V_DIM)[None, :]
        tl.store(partial + result[:, None] * V_DIM + v_dims[None, :], mixed / total[:, None], mask=mask)
        tl.store(partial_sums + result, peak + tl.log2(total), mask=group < GROUP)


@triton.jit
def combine_splits(
    partial,  # [max_listed, heads, v_head_dim] float32
    partial_sums,  # [max_listed, heads] float32
    sinks,  # [heads]
    output,  # [num_tokens, heads, v_head_dim], written at rows
    rows,  # [num_seqs] int32
    first_splits,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    SPLITS: tl.constexpr,  # combined at a time
):
    """One program a sequence and head."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, V_PAD)
    first = tl.load(first_splits + seq)
    end = tl.load(first_splits + seq + 1)
    mixed = tl.zeros([V_PAD], tl.float32)
    peak = -1e30  # finite, for a sequence without splits
    total = 0.0
    if SINKS:
        peak = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total = 1.0
    for start in range(first, end, SPLITS):
        places = start + tl.arange(0, SPLITS)
        at = places.to(tl.int64) * HEADS + head
        exists = places < end
        sums = tl.load(partial_sums + at, mask=exists, other=float("-inf"))
        mask = exists[:, None] & (dims < V_DIM)[None, :]
        values = tl.load(partial + at[:, None] * V_DIM + dims[None, :], mask=mask, other=0)
        higher = tl.maximum(peak, tl.max(sums, 0))
        fade = tl.exp2(peak - higher)
        weights = tl.exp2(sums - higher)
        total = total * fade + tl.sum(weights, 0)
        mixed = mixed * fade + tl.sum(values * weights[:, None], 0)
        peak = higher
    mixed /= tl.where(total > 0, total, 1.0)
    out = output + (tl.load(rows + seq).to(tl.int64) * HEADS + head) * V_DIM + dims
    tl.store(out, mixed.to(output.dtype.element_ty), mask=dims < V_DIM)
