"""`cache_ops` on a CUDA device: one launch of `cuda/cache_ops.cu` each, on torch's current stream, never waiting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from . import cuda_module

THREADS = 256
COPY_THREADS_PER_PLANE = 64 * THREADS
MAX_WORD_BYTES = 16
ROTARY_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _word_bytes(*numbers: int) -> int:
    """The largest of 16, 8, 4, 2 and 1 that divides all the addresses and lengths."""
    bits = MAX_WORD_BYTES
    for number in numbers:
        bits |= number
    return bits & -bits


def _row_bytes(cache: Tensor) -> int:
    """Of one token."""
    return cache.shape[2] * cache.shape[3] * cache.element_size()


def _block_shape(words: int) -> tuple[int, int]:
    """(threads along a row, rows of one block of threads) for rows of that many words."""
    across = min(128, 1 << max(words - 1, 0).bit_length())
    return across, THREADS // across


def _by_token(part: Tensor) -> Tensor:
    """[num_tokens, heads, head_dim] with each token's values contiguous, copied only if they are not yet."""
    return part if part.stride()[1:] == (part.shape[2], 1) else part.contiguous()


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    assert k.dtype == k_cache.dtype
    assert v.dtype == v_cache.dtype
    k, v = _by_token(k), _by_token(v)
    size = k.element_size()
    _scatter(k_cache, v_cache, slots, k.data_ptr(), size * k.stride(0), v.data_ptr(), size * v.stride(0))


def scatter(k_cache: Tensor, v_cache: Tensor, slots: Tensor, slab: int) -> None:
    """Copy the slab at an address of the device into the cache at `slots`."""
    k_row, v_row = _row_bytes(k_cache), _row_bytes(v_cache)
    _scatter(k_cache, v_cache, slots, slab, k_row, slab + len(slots) * k_row, v_row)


def _scatter(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: int, k_stride: int, v: int, v_stride: int) -> None:
    rows, k_row, v_row = len(slots), _row_bytes(k_cache), _row_bytes(v_cache)
    word = _word_bytes(k_cache.data_ptr(), v_cache.data_ptr(), k_row, v_row, k, k_stride, v, v_stride)
    across, down = _block_shape(max(k_row, v_row) // word)
    arguments = (
        k_cache.data_ptr(), v_cache.data_ptr(), k_row // word, v_row // word, slots.data_ptr(), rows,
        k, k_stride, v, v_stride,
    )  # fmt: skip
    cuda_module.launch("cache_ops", f"scatter_{word}", k_cache.device, (-(-rows // down), 2), (across, down), arguments)


def gather(k_cache: Tensor, v_cache: Tensor, slots: Tensor, slab: int) -> None:
    """Copy the tokens at `slots` into the slab at an address of the device (of this one, or one it can reach)."""
    rows, k_row, v_row = len(slots), _row_bytes(k_cache), _row_bytes(v_cache)
    word = _word_bytes(k_cache.data_ptr(), v_cache.data_ptr(), k_row, v_row, slab)
    across, down = _block_shape(max(k_row, v_row) // word)
    arguments = (k_cache.data_ptr(), v_cache.data_ptr(), k_row // word, v_row // word, slots.data_ptr(), rows, slab)
    cuda_module.launch("cache_ops", f"gather_{word}", k_cache.device, (-(-rows // down), 2), (across, down), arguments)


@lru_cache(maxsize=8)
def _planes(planes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor(planes, dtype=torch.int64, device=device)


def copy_block(caches: Sequence[Tensor], source: int, target: int) -> None:
    planes = tuple((cache.data_ptr(), cache[0].numel() * cache.element_size()) for cache in caches)
    word = _word_bytes(*(number for plane in planes for number in plane))
    words = max(num_bytes for _, num_bytes in planes) // word
    grid = (-(-min(words, COPY_THREADS_PER_PLANE) // THREADS), len(planes))
    arguments = (_planes(planes, caches[0].device).data_ptr(), source, target)
    cuda_module.launch("cache_ops", f"copy_block_{word}", caches[0].device, grid, (THREADS, 1), arguments)


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    tokens, heads, k_head_dim = q.shape
    _, kv_heads, v_head_dim = v.shape
    assert q.stride()[1:] == (k_head_dim, 1), "q is changed in place and must be contiguous within a token"
    k, v, cos, sin = _by_token(k), _by_token(v), cos.contiguous(), sin.contiguous()
    assert {x.dtype for x in (q, k, v, cos, sin, k_cache, v_cache)} == {q.dtype}
    arguments = (
        q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), cos.data_ptr(),
        sin.data_ptr(), cos.shape[1], heads, kv_heads, k_head_dim, v_head_dim, slots.data_ptr(),
        k_cache.data_ptr(), v_cache.data_ptr(),
    )  # fmt: skip
    name = f"rotate_and_write_{ROTARY_DTYPES[q.dtype]}"
    cuda_module.launch("rotary", name, q.device, (tokens, 1), (THREADS, 1), arguments)
