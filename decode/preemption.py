"""Where a preempted sequence's KV waits: host memory, bounded, as local slabs in the canonical layout.

Who is a victim is the scheduler's decision; how it comes back is decided here, once, when it is evicted:

    swap        its KV is copied to host memory and back when there is room again, if the space holds it
    move        its attempt ends; the gateway starts another one, whose tokens the prefill pool computes
    recompute   its tokens are computed here again, in bounded chunks beside everybody else
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal

from ..transfer.layout import KVLayout
from ..transfer.slab import KVStore, cut_slab
from .sequence import Sequence

PreemptionMode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True)
class SwapOut:
    """Copy the first `num_tokens` tokens out of `blocks`, the sequence's no more, before anything is written."""

    sequence: Sequence
    blocks: array[int]
    num_tokens: int


@dataclass(frozen=True)
class SwapIn:
    """Copy tokens [first_token, num_tokens) into the sequence's new blocks; those before were found in the cache."""

    sequence: Sequence
    first_token: int
    num_tokens: int


class SwapSpace:
    """Accounts for and holds the slabs of swapped sequences. Whoever ends a sequence calls `forget`."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._reserved: dict[Sequence, int] = {}
        self._slabs: dict[Sequence, list[memoryview]] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._reserved

    @property
    def used_tokens(self) -> int:
        return sum(self._reserved.values())

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room for that many tokens of the sequence, or False."""
        assert sequence not in self._reserved
        if num_tokens == 0 or self.used_tokens + num_tokens > self.capacity_tokens:
            return False
        self._reserved[sequence] = num_tokens
        return True

    def reserved(self, sequence: Sequence) -> int:
        """How many tokens of the sequence are (or will be) here."""
        return self._reserved.get(sequence, 0)

    def forget(self, sequence: Sequence) -> None:
        self._reserved.pop(sequence, None)
        self._slabs.pop(sequence, None)

    def fill(self, order: SwapOut, store: KVStore) -> None:
        """Carry out a swap to host, if the sequence has not been dropped meanwhile."""
        if order.sequence in self._reserved:
            self._slabs[order.sequence] = store.gather_all(order.blocks, order.num_tokens)

    def restore(self, order: SwapIn, store: KVStore, layout: KVLayout) -> None:
        """Carry out the way back. The sequence's blocks must cover its tokens."""
        slabs = self._slabs[order.sequence]
        missing = order.num_tokens - order.first_token
        for layer, slab in enumerate(slabs if missing > 0 else ()):
            part = cut_slab(slab, layout, layer, order.num_tokens, order.first_token)
            store.scatter(range(layer, layer + 1), order.sequence.table.blocks, order.first_token, missing, part)
        self.forget(order.sequence)
