"""Moving KV in and out of one layer's paged cache: writing a step, copying out a slab, copying in a slab.

A *slab* is the canonical wire form of a token range of one layer: all of K `[tokens, kv_heads, k_head_dim]`,
then all of V `[tokens, kv_heads, v_head_dim]`, contiguous, in the cache's dtype. A *slot* is
block * block_size + offset: the place of one token, so the same range can be cut into blocks of any size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_native import library_for


def write_kv(
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    k: Tensor,  # [num_tokens, kv_heads, k_head_dim]
    v: Tensor,  # [num_tokens, kv_heads, v_head_dim]
    slots: Tensor,  # [num_tokens] int64
) -> None:
    """Store the KV of a step's tokens at their slots. Slots must be distinct."""
    library = library_for(k, k_cache, v_cache) if v.dtype == k.dtype else None
    if library is not None and all(part.stride()[1:] == (part.shape[2], 1) for part in (k, v)):
        for cache, part in ((k_cache, k), (v_cache, v)):
            row_bytes = 4 * cache.shape[2] * cache.shape[3]
            library.pd_scatter_rows(
                cache.data_ptr(), part.data_ptr(), 4 * part.stride(0), slots.data_ptr(), len(slots), row_bytes
            )
        return
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v)


def _slab_parts(slab: Tensor, k_cache: Tensor, v_cache: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """K and V as views of a slab's bytes: [num_tokens, kv_heads, head_dim] each."""
    k_bytes = num_tokens * k_cache[0, 0].numel() * k_cache.element_size()
    v_bytes = num_tokens * v_cache[0, 0].numel() * v_cache.element_size()
    assert slab.numel() == k_bytes + v_bytes, f"slab of {slab.numel()} bytes, expected {k_bytes + v_bytes}"
    k = slab[:k_bytes].view(k_cache.dtype).view(num_tokens, *k_cache.shape[2:])
    v = slab[k_bytes:].view(v_cache.dtype).view(num_tokens, *v_cache.shape[2:])
    return k, v


def gather(
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, kv_heads, v_head_dim]
    slots: Tensor,  # [num_tokens] int64
    slab: Tensor,  # uint8 [slab bytes], on the cache's device
) -> None:
    """Copy the tokens at `slots` into a slab."""
    k, v = _slab_parts(slab, k_cache, v_cache, slots.numel())
    torch.index_select(k_cache.view(-1, *k_cache.shape[2:]), 0, slots, out=k)
    torch.index_select(v_cache.view(-1, *v_cache.shape[2:]), 0, slots, out=v)


def scatter(k_cache: Tensor, v_cache: Tensor, slots: Tensor, payload: memoryview) -> None:
    """Copy a slab (its bytes, read only once) into the cache at `slots`."""
    if payload.readonly:  # as received frames are, which are not aligned either; torch wants both
        slab = torch.empty(payload.nbytes, dtype=torch.uint8)
        slab.numpy().data[:] = payload.cast("B")
    else:
        slab = torch.frombuffer(payload, dtype=torch.uint8)
    k, v = _slab_parts(slab.to(k_cache.device), k_cache, v_cache, slots.numel())
    write_kv(k_cache, v_cache, k, v, slots)
