"""Slabs: copies of some tokens' KV of one layer, in the canonical layout, on their way between two owners.

Layout of a payload: K as [tokens, kv_heads, k_head_dim], then V as [tokens, kv_heads, v_head_dim], in the KV dtype;
then what more planes the layout has (scales of int8), [tokens, kv_heads] each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash

from .device import DeviceSpan
from .layout import KVLayout
from .messages import Slab


class KVStore(Protocol):
    """A worker's own paged KV, as far as slabs need it. `blocks` is the block table of the sequence."""

    def gather(
        self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, out: memoryview | None = None
    ) -> memoryview:
        """Those tokens' KV of one layer, in `out` (of exactly the right size) or a fresh buffer; the caller owns it."""
        ...

    def scatter(
        self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, payload: memoryview
    ) -> None:
        """Copy a payload of exactly the right size into the blocks."""
        ...

    def gather_all(self, blocks: Sequence[int], num_tokens: int) -> list[memoryview]:
        """The first tokens' KV of every layer, each in a fresh buffer."""
        ...

    def gather_to(self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, out: DeviceSpan) -> None:
        """As `gather`, into device memory. Only launched: it is done when the span's stream has come so far."""
        ...

    def scatter_from(
        self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, payload: DeviceSpan
    ) -> None:
        """As `scatter`, from device memory, and only launched."""
        ...


def store_slab(store: KVStore, slab: Slab, blocks: Sequence[int], payload: memoryview | DeviceSpan) -> None:
    """Copy what came with a slab's header, and was checked, into the blocks."""
    place = slab.layer, blocks, slab.first_token, slab.num_tokens
    if isinstance(payload, DeviceSpan):
        store.scatter_from(*place, payload)
    else:
        store.scatter(*place, payload)


def cut_slab(payload: memoryview, layout: KVLayout, layer: int, num_tokens: int, first: int) -> memoryview:
    """Tokens [first, num_tokens) of a slab that holds tokens [0, num_tokens) of a layer."""
    rows = layout.token_bytes(layer)
    assert payload.nbytes == num_tokens * sum(rows)
    if first == 0:
        return payload
    parts, start = [], 0
    for row in rows:
        end = start + num_tokens * row
        parts.append(bytes(payload[start + first * row : end]))
        start = end
    return memoryview(b"".join(parts))


def checksum(payload: memoryview | bytes) -> int:
    """XXH3-64 of the payload."""
    return xxhash.xxh3_64_intdigest(payload)
