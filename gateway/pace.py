"""How fast things go, as the gateway sees it: what its estimates of waiting and of crowding rest on.

Nothing here is configured or reported by a worker: rates are work done over time spent, with the past fading out, so
they hold for whatever machine, model, mixture of requests and number of gateways there is.
"""

from __future__ import annotations

from ..engine.rate import Rate

STEP_WINDOW = 16.0  # decode steps that the mean step time remembers
ANSWER_WINDOW = 16.0  # the same of answers to Reserve
LONGEST_ANSWER_S = 0.2  # one that takes longer has waited for blocks, which says nothing about the way


class Pace:
    """One worker's: tokens of prompts computed per second, and the length of its decode steps."""

    def __init__(self) -> None:
        self._compute = Rate()
        self._computed_at = 0.0  # when it was last through with a prompt
        self._steps = self._steps_s = self._sequences = 0.0  # sums over recent steps, fading
        self._batch: frozenset[str] = frozenset()
        self._stepped_at = 0.0
        self.answer_s = 0.0  # mean time until a decode worker has answered a Reserve; 0 while nothing is known

    @property
    def tokens_per_s(self) -> float | None:
        return self._compute.per_s

    def computed(self, num_tokens: int, asked_at: float, now: float) -> None:
        """A prompt that was sent there at `asked_at` is done. Until the one before was done, it had to wait."""
        self._compute.add(num_tokens, max(now - max(asked_at, self._computed_at), 0.0))
        self._computed_at = now

    def answered(self, after_s: float) -> None:
        """It has reserved blocks for a request, so long after that was placed there."""
        after_s = min(after_s, LONGEST_ANSWER_S)
        self.answer_s += (after_s - self.answer_s) / ANSWER_WINDOW if self.answer_s else after_s

    def stepped(self, requests: frozenset[str], now: float) -> None:
        """A decode step gave these requests tokens. Its length is known if it went on with one of them."""
        if requests & self._batch:
            kept = 1 - 1 / STEP_WINDOW
            self._steps = self._steps * kept + 1
            self._steps_s = self._steps_s * kept + (now - self._stepped_at)
            self._sequences = self._sequences * kept + len(requests)
        self._batch = requests
        self._stepped_at = now

    def step_s(self, num_requests: int) -> float:
        """An upper bound for the length of a step with so many requests; 0 while nothing is known.

        A step costs some fixed time and some for each sequence, so one more sequence than the mean of m makes it at
        most (m + 1) / m times as long: exact where decode is bound by arithmetic, cautious where memory bounds it.
        """
        if not self._steps:
            return 0.0
        return self._steps_s / self._steps * max(1.0, num_requests * self._steps / self._sequences)
