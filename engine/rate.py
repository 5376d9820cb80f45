"""Work per second, with the past fading out: how workers and gateways measure speed."""

from __future__ import annotations

import math

RATE_WINDOW_S = 10.0  # of busy time: how far back a rate remembers
WORKER_WINDOW_S = 3.0  # the same of a worker's own speed, which may change with every core that it is lent
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
