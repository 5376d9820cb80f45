"""Slabs: copies of some tokens' KV of a layer or several, in the canonical layout, on their way between two owners.

Layout of a payload, layer after layer: K as [tokens, kv_heads, k_head_dim], then V as [tokens, kv_heads, v_head_dim],
in the KV dtype; then what more planes the layout has (scales of int8), [tokens, kv_heads] each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .device import DeviceSpan
from .errors import TransferError
from .layout import KVLayout
from .messages import Slab


class KVStore(Protocol):
    """A worker's own paged KV, as far as slabs need it. `blocks` is the block table of the sequence."""

    def gather(
        self, layers: range, blocks: Sequence[int], first_token: int, num_tokens: int, out: memoryview | None = None
    ) -> tuple[memoryview, int]:
        """Those tokens' KV of those layers, in `out` (of exactly the right size) or a fresh buffer, which the caller
        owns; and its checksum."""
        ...

    def scatter(
        self, layers: range, blocks: Sequence[int], first_token: int, num_tokens: int, payload: memoryview
    ) -> int:
        """Copy a payload of exactly the right size into the blocks; the checksum of what was copied."""
        ...

    def gather_all(self, blocks: Sequence[int], num_tokens: int) -> list[memoryview]:
        """The first tokens' KV of every layer, each in a fresh buffer."""
        ...

    def gather_to(self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, out: DeviceSpan) -> None:
        """As `gather` of one layer, into device memory. Only launched: it is done when the span's stream has come so
        far."""
        ...

    def scatter_from(
        self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, payload: DeviceSpan
    ) -> None:
        """As `scatter` of one layer, from device memory, and only launched."""
        ...


def store_slab(store: KVStore, slab: Slab, blocks: Sequence[int], payload: memoryview | DeviceSpan) -> None:
    """Copy what came with a slab's header into the blocks, which belong to a reservation that is not complete.

    Raises TransferError if it did not arrive unharmed: the attempt must fail then, as the blocks hold what came. (What
    never left the devices has no checksum, see `link_cuda_ipc.py`.)
    """
    place = blocks, slab.first_token, slab.num_tokens
    if isinstance(payload, DeviceSpan):
        store.scatter_from(slab.layer, *place, payload)
    elif store.scatter(slab.layers, *place, payload) != slab.checksum:
        raise TransferError("bad_checksum", f"layer {slab.layer}, token {slab.first_token}")


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

