"""What stands between the matrix products of a decoder layer: on a GPU one kernel each (`rows_triton`), else torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .decoder_layer import Norm
from .triton_choice import in_triton

GATE_BLOCK = 1024


def normed_rows(
    x: Tensor,  # [rows, size], contiguous along size
    norm: Norm,
) -> Tensor:  # [rows, size]
    if not in_triton(x):
        return F.rms_norm(x, (x.shape[1],), norm.weight, norm.eps)
    from . import rows_triton  # not installed, and not wanted, where there is no GPU

    output = x.new_empty(x.shape)
    size = x.shape[1]
    pad = _power_of_2(size)
    rows_triton.norm_rows[(len(x),)](
        x, norm.weight, output, x.stride(0), norm.eps, SIZE=size, PAD=pad, num_warps=_warps(pad)
    )
    return output


def gated_rows(
    joined: Tensor,  # [rows, 2 * size] contiguous: gates, then ups
) -> Tensor:  # [rows, size]: silu(gate) * up
    rows, size = len(joined), joined.shape[1] // 2
    if not in_triton(joined):
        return F.silu(joined[:, :size]) * joined[:, size:]
    from . import rows_triton

    output = joined.new_empty(rows, size)
    rows_triton.gate_rows[(rows, -(-size // GATE_BLOCK))](joined, output, SIZE=size, BLOCK=GATE_BLOCK)
    return output


def turn_heads(
    qkv: Tensor,  # [rows, heads, head_dim] contiguous: those of q, then of k, then of v; changed in place
    q_heads: int,
    k_heads: int,
    cos: Tensor,  # [rows, rotary dims] contiguous, halves alike
    sin: Tensor,  # the same
    q_norm: Norm | None,  # of a head, both or none
    k_norm: Norm | None,
) -> None:
    """Norms of the heads of q and k, then their rotary positions."""
    assert (q_norm is None) == (k_norm is None)
    if not in_triton(qkv):
        _turn(qkv[:, :q_heads], cos, sin, q_norm)
        _turn(qkv[:, q_heads : q_heads + k_heads], cos, sin, k_norm)
        return
    from . import rows_triton

    head_dim, rotary = qkv.shape[2], cos.shape[1]
    rows_triton.turn_heads[(len(qkv), q_heads + k_heads)](
        qkv, cos, sin, qkv if q_norm is None else q_norm.weight, qkv if k_norm is None else k_norm.weight,
        qkv.stride(0), q_heads, 0.0 if q_norm is None else q_norm.eps, 0.0 if k_norm is None else k_norm.eps,
        NORMED=q_norm is not None, ROTARY=rotary, HEAD_DIM=head_dim,
        HALF_PAD=_power_of_2(rotary // 2), REST_PAD=_power_of_2(head_dim - rotary), num_warps=1,
    )  # fmt: skip


def _turn(part: Tensor, cos: Tensor, sin: Tensor, norm: Norm | None) -> None:  # part [rows, heads, head_dim]
    x = part if norm is None else F.rms_norm(part, (part.shape[2],), norm.weight, norm.eps)
    rotary = cos.shape[1]
    half = rotary // 2
    a, b = x[..., :half], x[..., half:rotary]
    cosines, sines = cos[:, None, :half], sin[:, None, :half]
    turned = torch.cat([a * cosines - b * sines, b * cosines + a * sines], dim=-1)
    if norm is not None:
        part[..., rotary:] = x[..., rotary:]
    part[..., :rotary] = turned


def _power_of_2(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _warps(pad: int) -> int:
    return min(16, max(1, pad // 512))
