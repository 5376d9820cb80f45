"""Memory for weights and KV: nothing overlaps, everything begins with a cache line, and neighbours lie side by side."""

from __future__ import annotations

import torch

from pdserve.kernels.pages import CHUNK_BYTES, LINE_BYTES, PAGE_BYTES, Pages


def test_what_is_kept_stays_as_it_was_and_begins_with_a_cache_line() -> None:
    pages = Pages()
    sizes = [1, LINE_BYTES, LINE_BYTES + 1, CHUNK_BYTES - PAGE_BYTES, PAGE_BYTES, CHUNK_BYTES + 1, 5]
    kept = [pages.keep(torch.full((size,), i, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    for i, (size, tensor) in enumerate(zip(sizes, kept, strict=True)):
        assert tensor.shape == (size,)
        assert (tensor == i).all()
        assert tensor.data_ptr() % LINE_BYTES == 0


def test_weights_lie_one_after_the_other_from_a_whole_page_on() -> None:
    pages = Pages()
    first, second = (pages.keep(torch.zeros(3, LINE_BYTES - 1, dtype=torch.uint8)) for _ in range(2))
    assert first.data_ptr() % PAGE_BYTES == 0
    assert second.data_ptr() - first.data_ptr() == 3 * LINE_BYTES
    assert second.shape == (3, LINE_BYTES - 1)
