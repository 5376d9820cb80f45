"""The inner loop of attention on a GPU: some queries over a range of one sequence's keys. Decode and prefill share it.

A program holds M rows of queries of one KV head: of a group's heads, or of several tokens times a group's heads, so
that a key is read once for all of them. Scores, softmax and sums are float32. They are kept in units of log2, as the
hardware's exponential is that of two.

Keys that a row may not see are masked after the product, and keys that do not exist are never read: their place in
memory may hold NaN, and the entries of a block table behind the last block any number at all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Through the exponential, as the interpreter has no tanh; exact to float32's rounding of 1."""
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def find_slots(
    table,  # pointer to a row of block tables
    start,  # the first key, a multiple of BLOCK_N
    end,  # one behind the last key
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where keys start .. start + BLOCK_N - 1 lie in the cache, in tokens: [BLOCK_N] int64."""
    if BLOCK_SIZE % BLOCK_N == 0:  # all in one block
        block = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0).to(tl.int64)
        return block * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    keys = start + tl.arange(0, BLOCK_N)
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
    return blocks * BLOCK_SIZE + keys % BLOCK_SIZE


@triton.jit
def attend_range(
    q,  # [M, K_PAD]
    mixed,  # [M, V_PAD] float32: values weighted so far
    peak,  # [M] float32: the largest score so far
    total,  # [M] float32: the sum of weights so far
    start,  # the first key, a multiple of BLOCK_N
    end,  # one behind the last key
    positions,  # [M]: each row sees keys up to here, from positions - window + 1 on
    kv_head,
    table,  # pointer to the sequence's row of block tables
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    score_scale,  # from a product to a score: over log(2), or over the soft cap
    score_cap,  # soft cap over log(2)
    window,
    MASKED: tl.constexpr,  # False promises that every row sees every key of the range, and BLOCK_N divides it
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,  # the cache is quantised, with a scale per token and KV head
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One pass over the keys; returns mixed, peak and total."""
    k_dims = tl.arange(0, K_PAD)
    v_dims = tl.arange(0, V_PAD)
    next_slots = find_slots(table, start, end, BLOCK_SIZE, BLOCK_N)
    for tile in tl.range(start, end, BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        exists = (keys < end) | (not MASKED)
        # Looked up one turn ahead: a load whose address is loaded in the same turn is not begun early.
        slots = next_slots * KV_HEADS + kv_head
        next_slots = find_slots(table, tile + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        k_mask = exists[:, None] & ((k_dims < K_DIM) | (K_DIM == K_PAD))[None, :]
        k = tl.load(k_cache + slots[:, None] * K_DIM + k_dims[None, :], mask=k_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * score_scale
        if SCALED:
            scores *= tl.load(k_scales + slots, mask=exists, other=0)[None, :]
        if CAPPED:
            scores = score_cap * tanh(scores)
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if WINDOWED:
                visible &= keys[None, :] > positions[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))

        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet has no peak; its weights must become 0, not NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.sum(weights, 1)
        peak = higher

        v_mask = exists[:, None] & ((v_dims < V_DIM) | (V_DIM == V_PAD))[None, :]
        v = tl.load(v_cache + slots[:, None] * V_DIM + v_dims[None, :], mask=v_mask, other=0.0)
        if SCALED:
            # Scales go to the weights, of which there are fewer; relative to the largest, for float16's narrow range.
            scales = tl.load(v_scales + slots, mask=exists, other=0)
            largest = tl.max(scales, 0)
            weights *= (scales / tl.where(largest > 0, largest, 1.0))[None, :]
            product = tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
            mixed = mixed * fade[:, None] + product * largest
        else:
            mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed * fade[:, None], input_precision="ieee")
    return mixed, peak, total
