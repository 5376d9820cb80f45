"""Slabs: copies of some tokens' KV of one layer, in the canonical layout, on their way between two owners.

Layout of a payload: K as [tokens, kv_heads, k_head_dim], then V as [tokens, kv_heads, v_head_dim], in the KV dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash


class KVStore(Protocol):
    """A worker's own paged KV, as far as slabs need it. `blocks` is the block table of the sequence."""

    def gather(self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int) -> memoryview:
        """A fresh buffer with those tokens' KV of one layer; the caller owns it."""
        ...

    def scatter(
        self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, payload: memoryview
    ) -> None:
        """Copy a payload of exactly the right size into the blocks."""
        ...


def checksum(payload: memoryview | bytes) -> int:
    """XXH3-64 of the payload."""
    return xxhash.xxh3_64_intdigest(payload)
