"""Which steps ask for a neighbour's core that is busy with prompts, so that streams keep --itl-slo-ms.

While nothing else is to be done on the machine, a step has the cores of all neighbours; beside prompts, it has its own.
How long a token then takes is measured: while tokens of late have taken more, on average, than the operator allows, the
next step asks (see `engine/cores.py`), and else it does not. So prompts pay no more than it takes, and one step in four
is theirs in any case, also where no help would be enough. A step that takes some of a prompt along is as long as it is
for that: it does not ask, and does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter

from ..engine.cores import Cores

MOST_IN_A_ROW = 3  # steps that ask, before one that does not
MOST_BEHIND = 2.0  # times the SLO: what is more, or saved up beyond that, is forgotten


class Need:
    """Whether the next step should ask, by how long tokens have taken."""

    def __init__(self, slo_s: float) -> None:
        self._slo_s = slo_s
        self._behind_s = 0.0  # what tokens of late have taken beyond the SLO, in all; below 0: less than that
        self._in_a_row = 0

    @property
    def asks(self) -> bool:
        return self._behind_s > 0 and self._in_a_row < MOST_IN_A_ROW

    def measured(self, token_s: float, *, asked: bool) -> None:
        """So long after the token before, streams got the next one, by a step that had asked or had not."""
        most_s = MOST_BEHIND * self._slo_s
        self._behind_s = min(max(self._behind_s + token_s - self._slo_s, -most_s), most_s)
        self._in_a_row = self._in_a_row + 1 if asked else 0


class Wishes:
    """Asks where there is need. `slo_s` None: never."""

    def __init__(self, cores: Cores, slo_s: float | None, steps_asking: Counter) -> None:
        self._cores = cores
        self._need = Need(slo_s) if slo_s is not None else None
        self._steps_asking = steps_asking
        self._token_at: float | None = None

    @contextmanager
    def step(self, streams: int, prompt_tokens: int) -> Iterator[None]:
        """Around a step with so many streams and tokens of prompts in it."""
        need = self._need if streams and not prompt_tokens else None
        asked = need is not None and need.asks and self._cores.ask()
        try:
            yield
        finally:
            self._cores.ask_no_more()
        now = time.monotonic()
        self._steps_asking.inc(asked)
        if need is not None and self._token_at is not None:
            need.measured(now - self._token_at, asked=asked)
        self._token_at = now if streams else None

    def pause(self) -> None:
        """No step follows the last one at once."""
        self._token_at = None
