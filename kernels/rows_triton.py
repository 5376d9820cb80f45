"""What stands between the matrix products of a decoder layer, in Triton: norms, rotary positions, gates."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_rows(x, weight, output, x_stride, eps, SIZE: tl.constexpr, PAD: tl.constexpr):
    """weight * x / sqrt(mean(x²) + eps), a program for each row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PAD)
    inside = at < SIZE
    values = tl.load(x + row * x_stride + at, mask=inside, other=0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values) / SIZE + eps)
    weights = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    tl.store(output + row * SIZE + at, (values * scale * weights).to(output.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(joined, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up; joined: rows of SIZE gates, then SIZE ups."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(joined + row * 2 * SIZE + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(joined + row * 2 * SIZE + SIZE + at, mask=inside, other=0).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(output + row * SIZE + at, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def turn_heads(
    qkv,  # pointer to [rows, all heads, head_dim], changed in place
    cos,  # pointer to [rows, ROTARY]
    sin,
    q_weight,  # pointers to [head_dim], not read unless NORMED
    k_weight,
    row_stride,
    q_heads,
    q_eps,
    k_eps,
    NORMED: tl.constexpr,
    ROTARY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
):
    """The norm of one head of q or k, then its rotary positions; a program for each row and head.

    Both of a pair are read and written by the same thread: nothing is overwritten that another has yet to read.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = ROTARY // 2
    start = qkv + row * row_stride + head * HEAD_DIM
    at, rest = tl.arange(0, HALF_PAD), ROTARY + tl.arange(0, REST_PAD)
    paired, alone = at < half, rest < HEAD_DIM
    a = tl.load(start + at, mask=paired, other=0).to(tl.float32)
    b = tl.load(start + half + at, mask=paired, other=0).to(tl.float32)
    if NORMED:
        c = tl.load(start + rest, mask=alone, other=0).to(tl.float32)
        squares = tl.sum(a * a) + tl.sum(b * b) + tl.sum(c * c)
        scale = 1 / tl.sqrt(squares / HEAD_DIM + tl.where(head < q_heads, q_eps, k_eps))
        a *= scale * _norm_weights(q_weight, k_weight, head, q_heads, at, paired)
        b *= scale * _norm_weights(q_weight, k_weight, head, q_heads, half + at, paired)
        c *= scale * _norm_weights(q_weight, k_weight, head, q_heads, rest, alone)
        tl.store(start + rest, c.to(qkv.dtype.element_ty), mask=alone)
    cosines = tl.load(cos + row * ROTARY + at, mask=paired, other=0).to(tl.float32)
    sines = tl.load(sin + row * ROTARY + at, mask=paired, other=0).to(tl.float32)
    tl.store(start + at, (a * cosines - b * sines).to(qkv.dtype.element_ty), mask=paired)
    tl.store(start + half + at, (b * cosines + a * sines).to(qkv.dtype.element_ty), mask=paired)


@triton.jit
def _norm_weights(q_weight, k_weight, head, q_heads, at, mask):
    heads = at * 0 + head
    of_q = tl.load(q_weight + at, mask=mask & (heads < q_heads), other=0).to(tl.float32)
    of_k = tl.load(k_weight + at, mask=mask & (heads >= q_heads), other=0).to(tl.float32)
    return of_q + of_k
