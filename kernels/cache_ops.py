"""Moving KV in and out of one layer's paged cache: writing a step, copying out a slab, copying in a slab.

A *slab* is the canonical wire form of a token range of one layer: all of K `[tokens, kv_heads, k_head_dim]`,
then all of V `[tokens, kv_heads, v_head_dim]`, contiguous, in the cache's dtype; with int8 caches then the scales of K
and those of V, `[tokens, kv_heads]` in float32. A *slot* is block * block_size + offset: the place of one token, so the
same range can be cut into blocks of any size.

Each function picks the version for the caches' device: `cache_ops_cuda.py` on a GPU (if CuPy is there), a kernel in C
where one fits, else torch, which runs anywhere and is the reference. Slabs of caches in memory have kernels of their
own (`slabs.py`), by block table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cache_ops_cuda
from .attention_native import library_for, paged_layer
from .cuda_module import cupy
from .kv_int8 import Scales
from .kv_int8 import write as write_int8


def _in_cuda(cache: Tensor) -> bool:
    return cache.is_cuda and cupy() is not None


def write_kv(
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    k: Tensor,  # [num_tokens, kv_heads, k_head_dim]
    v: Tensor,  # [num_tokens, kv_heads, v_head_dim]
    slots: Tensor,  # [num_tokens] int64
    scales: Scales | None = None,  # of int8 caches: k and v, float32, are quantised
) -> None:
    """Store the KV of a step's tokens at their slots. Slots must be distinct."""
    if _in_cuda(k_cache):
        cache_ops_cuda.write_kv(k_cache, v_cache, k, v, slots)
        return
    library = library_for(k, k_cache, v_cache) if v.dtype == k.dtype else None
    if library is not None and all(part.stride()[1:] == (part.shape[2], 1) for part in (k, v)):
        layer = paged_layer(library, 1, k_cache, v_cache, scales)
        library.pd_write_kv(
            layer.pointer, slots.data_ptr(), slots.shape[0], k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        )
        return
    if scales is not None:
        for cache, plane, part in zip((k_cache, v_cache), scales, (k, v), strict=True):
            write_int8(cache, plane, part, slots)
        return
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v)


def rotate_and_write(
    q: Tensor,  # [num_tokens, heads, k_head_dim], contiguous within a token; turned in place
    k: Tensor,  # [num_tokens, kv_heads, k_head_dim]
    v: Tensor,  # [num_tokens, kv_heads, v_head_dim]
    cos: Tensor,  # [num_tokens, rotary dims]
    sin: Tensor,  # [num_tokens, rotary dims]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    slots: Tensor,  # [num_tokens] int64
) -> None:
    """Turn q and k by their rotary positions (halves paired) and store k and v at their slots, all of one dtype."""
    if _in_cuda(k_cache):
        cache_ops_cuda.rotate_and_write(q, k, v, cos, sin, k_cache, v_cache, slots)
        return
    q.copy_(_rotated(q, cos, sin))
    write_kv(k_cache, v_cache, _rotated(k, cos, sin), v, slots)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [num_tokens, heads, head_dim]
    turned, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return torch.cat([turned, rest], dim=-1)


def copy_block(caches: Sequence[Tensor], source: int, target: int) -> None:
    """Copy one block onto another in each cache [num_blocks, ...]."""
    if _in_cuda(caches[0]):
        cache_ops_cuda.copy_block(caches, source, target)
        return
    for cache in caches:
        cache[target].copy_(cache[source])


def _as_bytes(scales: Scales | None) -> list[Tensor]:  # uint8 [num_blocks, block_size, kv_heads * 4] each
    """In a slab, scales may lie behind an odd number of bytes, where torch sees no floats."""
    return [] if scales is None else [plane.view(torch.uint8) for plane in scales]


def _slab_parts(slab: Tensor, planes: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
    """Views of a slab's bytes: [num_tokens, ...] of every cache [num_blocks, block_size, ...]."""
    sizes = [num_tokens * plane[0, 0].nbytes for plane in planes]
    assert slab.numel() == sum(sizes), f"slab of {slab.numel()} bytes, expected {sum(sizes)}"
    return [
        part.view(plane.dtype).view(num_tokens, *plane.shape[2:])
        for plane, part in zip(planes, torch.split(slab, sizes), strict=True)
    ]


def gather(
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    slots: Tensor,  # [num_tokens] int64
    slab: Tensor,  # uint8 [slab bytes], on the cache's device
    scales: Scales | None = None,  # of int8 caches
) -> None:
    """Copy the tokens at `slots` into a slab."""
    if _in_cuda(k_cache):
        cache_ops_cuda.gather(k_cache, v_cache, slots, slab.data_ptr())
        return
    planes = (k_cache, v_cache, *_as_bytes(scales))
    parts = _slab_parts(slab, planes, slots.numel())
    for plane, part in zip(planes, parts, strict=True):
        torch.index_select(plane.view(-1, *plane.shape[2:]), 0, slots, out=part)


def scatter(
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, payload: memoryview, scales: Scales | None = None
) -> None:
    """Copy a slab (its bytes, read only once) into the cache at `slots`."""
    if payload.readonly:  # as received frames are, which are not aligned either; torch wants both
        slab = torch.empty(payload.nbytes, dtype=torch.uint8)
        slab.numpy().data[:] = payload.cast("B")
    else:
        slab = torch.frombuffer(payload, dtype=torch.uint8)
    slab = slab.to(k_cache.device)
    if _in_cuda(k_cache):
        assert slab.numel() == slots.numel() * sum(cache[0, 0].nbytes for cache in (k_cache, v_cache))
        cache_ops_cuda.scatter(k_cache, v_cache, slots, slab.data_ptr())
        return
    planes = (k_cache, v_cache, *_as_bytes(scales))
    parts = _slab_parts(slab, planes, slots.numel())
    write_kv(k_cache, v_cache, parts[0], parts[1], slots)
    for plane, part in zip(planes[2:], parts[2:], strict=True):
        plane.view(-1, plane.shape[2]).index_copy_(0, slots, part)
