"""The receiving end: one entry per live reservation, and the rules by which a slab is taken or dropped.

Life of an entry: `expect` (decode allocated the blocks) → slabs, per layer in order and without gaps → `complete`
(handoff with every layer full) or `forget` (cancel, death, deadline). The entry knows no blocks: its owner scatters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .device import DeviceSpan
from .errors import TransferError
from .layout import KVLayout
from .messages import Handoff, Slab

Key = tuple[str, int]


@dataclass
class Incoming:
    """What one reservation has received. `next_token[layer]` is the first token not yet here."""

    request: str
    attempt: int
    reservation: int
    sender: str  # worker id of the prefill bound to this attempt
    first_token: int
    num_tokens: int
    next_token: list[int] = field(default_factory=list)
    num_bytes: int = 0
    started_at: float | None = None

    @property
    def complete(self) -> bool:
        return all(token == self.num_tokens for token in self.next_token)


class Receiver:
    """Checks slabs against live reservations. Holds metadata only."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._incoming: dict[Key, Incoming] = {}

    def __len__(self) -> int:
        return len(self._incoming)

    def expect(self, request: str, attempt: int, reservation: int, sender: str, held: int, total: int) -> None:
        """Tokens [held, total) of every layer will come from `sender`."""
        entry = Incoming(request, attempt, reservation, sender, held, total, [held] * self._layout.num_layers)
        self._incoming[request, attempt] = entry

    def forget(self, request: str, attempt: int) -> None:
        self._incoming.pop((request, attempt), None)

    def find(self, message: Slab | Handoff, sender: str) -> Incoming | None:
        """The live reservation a message belongs to; None for unknown, old, or somebody else's."""
        entry = self._incoming.get((message.request, message.attempt))
        if entry is None or entry.reservation != message.reservation or entry.sender != sender:
            return None
        return entry

    def check(self, entry: Incoming, slab: Slab, payload: memoryview | DeviceSpan) -> None:
        """Raise TransferError unless the slab is the very next piece of its layers. Whether it is unharmed shows when
        it is copied (`store_slab`)."""
        if slab.layers.stop > self._layout.num_layers:
            raise TransferError("bad_layer", f"layer {slab.layers.stop - 1} of {self._layout.num_layers}")
        if isinstance(payload, DeviceSpan) and slab.num_layers > 1:
            raise TransferError("bad_layer", f"{slab.num_layers} layers at once from a device")
        for layer in slab.layers:
            if slab.first_token != entry.next_token[layer]:
                raise TransferError(
                    "gap", f"layer {layer}: token {slab.first_token} came, {entry.next_token[layer]} was next"
                )
        if slab.first_token + slab.num_tokens > entry.num_tokens:
            raise TransferError("overrun", f"layer {slab.layer}: past token {entry.num_tokens}")
        expected = slab.num_tokens * self._layout.bytes_per_token_of(slab.layers)
        if payload.nbytes != expected:
            raise TransferError("bad_size", f"layer {slab.layer}: {payload.nbytes} bytes, not {expected}")

    def taken(self, entry: Incoming, slab: Slab, num_bytes: int) -> None:
        """The slab is in its blocks."""
        for layer in slab.layers:
            entry.next_token[layer] += slab.num_tokens
        entry.num_bytes += num_bytes
        if entry.started_at is None:
            entry.started_at = time.monotonic()

    def complete(self, entry: Incoming) -> float:
        """The handoff is here: raise TransferError if a layer is not full, else end the entry.

        Returns the seconds since its first slab (0 when nothing had to be sent).
        """
        if not entry.complete:
            short = next(i for i, token in enumerate(entry.next_token) if token != entry.num_tokens)
            raise TransferError("incomplete", f"layer {short}: {entry.next_token[short]} of {entry.num_tokens} tokens")
        self.forget(entry.request, entry.attempt)
        return 0.0 if entry.started_at is None else time.monotonic() - entry.started_at
