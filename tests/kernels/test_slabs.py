"""Slabs in and out of caches in C: the same bytes as by definition, and XXH3-64 of them, whatever the shapes."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels import cache_ops
from pdserve.kernels.pages import LINE_BYTES, PAGE_BYTES, Pages
from pdserve.kernels.slabs import LONG_BYTES, PagedPlanes, checksum, paged_planes, zeros

GUARD_BYTES = 64
NUM_BLOCKS = 40


def random_planes(shapes: list[tuple[int, int]], block_size: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """One [NUM_BLOCKS, block_size, heads, dim] for each (heads, dim)."""
    generator = torch.Generator().manual_seed(seed)
    pages = Pages()
    made = [zeros((NUM_BLOCKS, block_size, *shape), dtype, pages) for shape in shapes]
    for plane in made:
        plane.view(torch.uint8).random_(0, 256, generator=generator)
    return made


def definition(planes: list[Tensor], table: list[int], first_token: int, num_tokens: int) -> bytes:
    block_size = planes[0].shape[1]
    places = [divmod(token, block_size) for token in range(first_token, first_token + num_tokens)]
    parts = [torch.stack([plane[table[block], offset] for block, offset in places]) for plane in planes]
    return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)


def room(num_bytes: int, shift: int = 0) -> memoryview:
    """A slab's memory in the middle of a buffer, `shift` bytes behind a whole cache line."""
    whole = zeros((num_bytes + 2 * GUARD_BYTES + shift,), torch.uint8, Pages()).numpy()
    whole[:] = 0xA5
    return whole.data[GUARD_BYTES + shift : GUARD_BYTES + shift + num_bytes]


def is_guarded(slab: memoryview) -> bool:
    """Nothing was written beside it."""
    whole = np.asarray(slab.obj)
    start = np.frombuffer(slab, np.uint8).ctypes.data - whole.ctypes.data
    return bool((whole[:start] == 0xA5).all() and (whole[start + slab.nbytes :] == 0xA5).all())


@settings(max_examples=60)
@given(
    shapes=st.sampled_from([[(3, 64), (3, 64)], [(3, 5), (3, 7)], [(1, 1), (1, 1)], [(2, 16), (1, 3), (1, 4), (1, 4)]]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    first_token=st.integers(0, 40),
    num_tokens=st.integers(1, 300),
    shift=st.sampled_from([0, 1, 16]),
    data=st.data(),
)
def test_a_range_goes_out_and_in_as_defined(
    library: ctypes.CDLL, shapes: list[tuple[int, int]], dtype: torch.dtype, block_size: int, first_token: int,
    num_tokens: int, shift: int, data: st.DataObject,
) -> None:  # fmt: skip
    num_tokens = min(num_tokens, NUM_BLOCKS * block_size - first_token)
    planes = random_planes(shapes, block_size, dtype, num_tokens)
    others = random_planes(shapes, block_size, dtype, 77)
    source = PagedPlanes(library, [others, planes, others])
    if num_tokens <= 0 or num_tokens * sum(plane[0, 0].nbytes for plane in planes) <= LONG_BYTES:
        return
    order = random.Random(data.draw(st.integers(0, 99))).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    table = order[: -(-(first_token + num_tokens) // block_size)]
    expected = definition(planes, table, first_token, num_tokens)
    slab = room(len(expected), shift)
    assert source.gather(range(1, 2), np.array(table), first_token, num_tokens, slab) == checksum(expected)
    assert bytes(slab) == expected
    assert is_guarded(slab)
    target = random_planes(shapes, block_size, dtype, 1000)
    untouched = [plane.clone() for plane in target]
    into = PagedPlanes(library, [others, target])
    assert into.scatter(range(1, 2), np.array(table), first_token, num_tokens, slab) == checksum(expected)
    for token in range(first_token, first_token + num_tokens):
        place = table[token // block_size], token % block_size
        for plane, source, old in zip(target, planes, untouched, strict=True):
            assert torch.equal(plane[place].view(torch.uint8), source[place].view(torch.uint8))
            old[place] = source[place]
    for plane, old in zip(target, untouched, strict=True):
        assert torch.equal(plane.view(torch.uint8), old.view(torch.uint8)), "other tokens were touched"


@pytest.mark.parametrize("num_bytes", [241, 255, 256, 257, 1023, 1024, 1025, 1088, 2048, 2049, 10_000, 65_536])
def test_the_checksum_is_xxh3_of_any_length(library: ctypes.CDLL, num_bytes: int) -> None:
    planes = random_planes([(1, 1)], 400, torch.uint8, num_bytes)
    slab = room(num_bytes)
    table = np.arange(NUM_BLOCKS)
    for plane in (planes[0][:, :16].contiguous(), zeros((65_536, 1, 1, 1), torch.uint8, Pages())):
        layer = PagedPlanes(library, [[plane]])
        if num_bytes > plane.numel():
            continue
        blocks = table if plane.shape[1] == 16 else np.arange(65_536)
        total = layer.gather(range(1), blocks, 0, num_bytes, slab)
        assert total == checksum(slab)


def test_layers_follow_each_other_as_torch_has_them() -> None:
    layers = [random_planes([(3, 5), (3, 7)], 16, torch.float32, seed) for seed in range(3)]
    planes = paged_planes(layers)
    if planes is None:
        pytest.skip("there is no C compiler")
    slots = torch.cat([torch.arange(16) + 16 * block for block in (7, 2, 9, 4)])[5:55]
    parts = [torch.empty(50 * 3 * (5 + 7) * 4, dtype=torch.uint8) for _ in range(2)]
    for layer, part in zip(layers[1:], parts, strict=True):
        cache_ops.gather(*layer, slots, part)
    expected = torch.cat(parts)
    slab = room(expected.numel())
    planes.gather(range(1, 3), np.array([7, 2, 9, 4]), 5, 50, slab)
    assert bytes(slab) == expected.numpy().tobytes()


def test_planes_begin_with_a_cache_line_and_are_zero() -> None:
    pages = Pages()
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        plane = zeros((3, 5, 2, 7), dtype, pages)
        assert plane.data_ptr() % LINE_BYTES == 0
        assert plane.shape == (3, 5, 2, 7)
        assert not plane.any()


def test_small_planes_share_large_pages() -> None:
    pages = Pages()
    planes = [zeros((8, 16, 2, 4), torch.float32, pages) for _ in range(9)]
    assert len({plane.data_ptr() // PAGE_BYTES for plane in planes}) == 1
    for i, plane in enumerate(planes):
        plane.fill_(i)
    assert all((plane == i).all() for i, plane in enumerate(planes)), "they overlap"
