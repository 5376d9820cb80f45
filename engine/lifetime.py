"""A request's lifetime as data: events with monotonic times, and every latency a difference of two of them.

Torch-free. Times are of one clock of one process; what crosses the wire is a duration, never a time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from enum import Enum
from itertools import pairwise


class Event(Enum):
    """What can happen to a request, in the order in which it normally does."""

    ARRIVED = "arrived"
    QUEUED = "queued"
    RESERVED = "reserved"
    PREFILL_STARTED = "prefill started"
    FIRST_TOKEN = "first token"
    KV_COMPLETE = "KV complete"
    FINISHED = "finished"


class Lifetime:
    """When each event happened first, when each token came, and why it ended. All times in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[Event, float] = {}
        self._tokens: dict[int, array[float]] = {}
        self.finished_because = ""

    def mark(self, event: Event, at: float | None = None) -> None:
        """Note `event`, now or `at`. Only its first time counts: a second attempt does not move it."""
        self._times.setdefault(event, self._clock() if at is None else at)

    def token(self, choice: int) -> None:
        """A token of `choice` was accepted now. The very first one of the request is also FIRST_TOKEN."""
        now = self._clock()
        self.mark(Event.FIRST_TOKEN, now)
        self._tokens.setdefault(choice, array("d")).append(now)

    def finish(self, because: str) -> None:
        if Event.FINISHED not in self._times:
            self.finished_because = because
            self.mark(Event.FINISHED)

    def at(self, event: Event) -> float | None:
        return self._times.get(event)

    def between(self, start: Event, end: Event) -> float | None:
        """Seconds from `start` to `end`, or None while either has not happened."""
        first, last = self._times.get(start), self._times.get(end)
        return None if first is None or last is None else last - first

    @property
    def queue_s(self) -> float | None:
        return self.between(Event.ARRIVED, Event.RESERVED)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.between(Event.ARRIVED, Event.FIRST_TOKEN)

    @property
    def e2e_s(self) -> float | None:
        return self.between(Event.ARRIVED, Event.FINISHED)

    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gap before every token but the first, of all choices."""
        return [b - a for times in self._tokens.values() for a, b in pairwise(times)]

    def tpot_s(self) -> list[float]:
        """Time per output token, one per choice of at least two tokens: (last - first) / (tokens - 1)."""
        return [(t[-1] - t[0]) / (len(t) - 1) for t in self._tokens.values() if len(t) > 1]
