"""Which requests leave a decode worker that drains, and when: as soon as another one has room, and not before.

A stream that stays goes on undisturbed, so the last decode worker of a system finishes what it has. Nothing of a
prefill worker moves: what it computes is done sooner where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .worker import Leg, Worker


@dataclass
class Room:
    """What a decode worker could take on at once, without making anybody wait."""

    capacity_tokens: int  # the longest sequence it can ever hold
    places: int
    free_tokens: int

    @classmethod
    def at(cls, worker: Worker) -> Room:
        beat = worker.heartbeat
        assert beat is not None, "only ready workers have room"
        free_tokens = beat.free_blocks * worker.register.block_size - worker.pending_tokens()
        taken = max(len(worker.legs), beat.running + beat.waiting)
        return cls(worker.capacity_tokens, worker.register.max_sequences - taken, free_tokens)

    def fits(self, leg: Leg) -> bool:
        return self.places > 0 and self.free_tokens >= leg.num_tokens and self.capacity_tokens >= leg.max_tokens

    def take(self, leg: Leg) -> None:
        self.places -= 1
        self.free_tokens -= leg.num_tokens


def movable(leaving: Worker, others: Iterable[Worker]) -> Iterator[Leg]:
    """Attempts at `leaving` that `others` have room for now, the oldest first. Each is named once."""
    rooms = [Room.at(worker) for worker in others]
    for leg in leaving.legs.values():
        room = max((room for room in rooms if room.fits(leg)), key=lambda room: room.free_tokens, default=None)
        if room is not None and not leg.moving:
            room.take(leg)
            leg.moving = True
            yield leg
