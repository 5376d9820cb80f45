"""Stop strings on growing text: the earliest one ends it, and not a character of one is ever shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Cuts text at the first stop string, whatever pieces the text arrives in.

    The match with the smallest start wins (of two at one place the shorter), exactly as if `min(text.find(stop))` had
    been taken over the whole text. So when a stop string is complete but an earlier one might still become so, the
    scanner waits. `stopped` is the stop string that was found. At most the longest stop string's length is held back.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self._floor = 0  # a match must end behind this offset into `_held`
        self.stopped: str | None = None

    def feed(self, text: str, *, final: bool = False, may_stop: bool = True) -> str:
        """Take `text` in; the text that may be shown now. `final`: nothing follows. `may_stop` false: a stop string
        that ends within this text (or before) does not count."""
        assert self.stopped is None
        if not self._stops:
            return text
        held = self._held + text
        if not may_stop:
            self._floor = len(held)
        open_at = len(held) if final else min(open_start(held, stop) for stop in self._stops)
        match = self._first_match(held)
        if match is not None and match[0] <= open_at:
            start, length = match
            self._held = ""
            self.stopped = held[start : start + length]
            return held[: start + length if self._include_stop else start]
        self._held = held[open_at:]
        self._floor = max(0, self._floor - open_at)
        return held[:open_at]

    def _first_match(self, held: str) -> tuple[int, int] | None:
        """(start, length) of the winning complete match."""
        found = [
            (start, len(stop))
            for stop in self._stops
            if (start := held.find(stop, max(0, self._floor - len(stop) + 1))) >= 0
        ]
        return min(found, default=None)


def open_start(held: str, stop: str) -> int:
    """Where the longest suffix of `held` that is a proper prefix of `stop` begins; len(held) if there is none."""
    start = max(0, len(held) - len(stop) + 1)
    while (start := held.find(stop[0], start)) >= 0:
        if stop.startswith(held[start:]):
            return start
        start += 1
    return len(held)
