"""KV in int8 by definition: every row of a head (one token's K, or V) has a scale of its own, its largest value / 127.

The kernels in C do the same (`native/paged.c`), to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

Scales = tuple[Tensor, Tensor]  # float32 [num_blocks, block_size, kv_heads], of K and of V


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:  # [.., dim] float32 -> int8 [.., dim], float32 [..]
    """What is not finite makes the scale NaN, so that it is not lost."""
    most = x.abs().amax(dim=-1)
    finite = most.isfinite()
    largest = most.new_tensor(127.0)  # a tensor: torch turns a number over a tensor into a product, which rounds twice
    inverse = torch.where(finite & (most > 0), largest / most, torch.zeros_like(most))
    rounded = torch.where(finite[..., None], torch.round(x * inverse[..., None]), torch.zeros_like(x))
    return rounded.to(torch.int8), torch.where(finite, most / largest, torch.full_like(most, torch.nan))


def dequantise(x: Tensor, scales: Tensor) -> Tensor:  # int8 [.., dim], float32 [..] -> float32 [.., dim]
    return x.float() * scales[..., None]


def write(cache: Tensor, scales: Tensor, x: Tensor, slots: Tensor) -> None:
    """cache [num_blocks, block_size, kv_heads, dim] int8, x [num_tokens, kv_heads, dim], slots [num_tokens]."""
    values, sizes = quantise(x.float())
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, values)
    scales.view(-1, scales.shape[2]).index_copy_(0, slots, sizes)
