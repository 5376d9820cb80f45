"""Memory for what is read or written in long stretches, weights and KV: side by side, in large pages where the system
has them.

A processor stops fetching ahead where a page ends, and a step of few rows waits for little but memory: products with
int8 weights of one row take a fifth less time than with every weight in small pages of its own (Zen 5). KV whose blocks
lie anywhere is copied out a quarter faster (Zen 4).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
CHUNK_BYTES = 16 * PAGE_BYTES
LINE_BYTES = 64


class Pages:
    """Hands out memory from large chunks, in order. It is never reused; a chunk lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def keep(self, packed: Tensor) -> Tensor:  # [...] uint8 → a copy of it that begins with a cache line
        return self.zeros(packed.numel()).view(packed.shape).copy_(packed)

    def zeros(self, num_bytes: int) -> Tensor:  # [num_bytes] uint8, from a cache line on
        """Takes no memory before it is written."""
        if self._used_bytes + num_bytes > len(self._chunk):
            self._chunk, self._used_bytes = _chunk(num_bytes), 0
        room = self._chunk[self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += num_bytes + -num_bytes % LINE_BYTES
        return room


def _chunk(num_bytes: int) -> Tensor:  # [at least num_bytes] uint8, whole pages that take no memory before their use
    size = max(CHUNK_BYTES, num_bytes + -num_bytes % PAGE_BYTES)
    chunk = torch.from_numpy(np.zeros(size + PAGE_BYTES, dtype=np.uint8))  # NumPy asks the system for large pages
    first = -chunk.data_ptr() % PAGE_BYTES
    return chunk[first : first + size]
