"""Work per second, with the past fading out: how workers and gateways measure speed."""

from __future__ import annotations

import math

RATE_WINDOW_S = 10.0  # of busy time: how far back a rate remembers
WORKER_WINDOW_S = 3.0  # the same of a worker's own speed, which may change with every core that it is lent
HELPED_SHARE = 0.25  # of a step: with so much of a neighbour's core counts as computed on two
MIN_RATE_TIME_S = 0.05  # of busy time: with less than this a rate is not known


class Rate:
    """Work per second of busy time. `add` tells how much was done in how long; None while nothing is known."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._work = 0.0
        self._time_s = 0.0

    def add(self, work: float, busy_s: float) -> None:
        kept = math.exp(-busy_s / self._window_s)
        self._work = self._work * kept + work
        self._time_s = self._time_s * kept + busy_s

    @property
    def per_s(self) -> float | None:
        return self._work / self._time_s if self._time_s >= MIN_RATE_TIME_S else None


class PromptRate:
    """A worker's speed in computing prompts: of late, and apart from that in steps that a neighbour's core helped with,
    as one does while nothing else runs. The latter is not forgotten while the machine is busy."""

    def __init__(self) -> None:
        self._of_late = Rate(WORKER_WINDOW_S)
        self._helped = Rate(WORKER_WINDOW_S)

    def add(self, tokens: int, elapsed_s: float, helped_s: float) -> None:
        """A step of so many tokens; `helped_s`: what helpers have worked in it."""
        self._of_late.add(tokens, elapsed_s)
        if helped_s >= HELPED_SHARE * elapsed_s:
            self._helped.add(tokens, elapsed_s)

    @property
    def per_s(self) -> float | None:
        return self._of_late.per_s

    def lone_per_s(self, *, borrows: bool) -> float | None:
        """With nothing else running. `borrows`: are there cores that could help then?"""
        return self._helped.per_s if borrows else self._of_late.per_s
