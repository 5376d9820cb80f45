"""Which rate to try next: pure arithmetic, so that it is tested without a server.

Rates are steps of a geometric scale, `base x 2^(step / 8)`. So two servers that start from the same base are measured
at the same rates, and "the highest rate" has a known resolution, one step.
"""

from __future__ import annotations

from collections.abc import Mapping

STEPS_PER_DOUBLING = 8
RESOLUTION = 2 ** (1 / STEPS_PER_DOUBLING)
LOWEST_STEP = -6 * STEPS_PER_DOUBLING  # 1/64 of the base
HIGHEST_STEP = 10 * STEPS_PER_DOUBLING


def rate_of(base_per_s: float, step: int) -> float:
    """Requests a second."""
    return float(base_per_s * 2 ** (step / STEPS_PER_DOUBLING))


def bracket(passed: Mapping[int, bool]) -> tuple[int | None, int | None]:
    """(highest step that passed below every one that did not, lowest that did not)."""
    failing = min((step for step, ok in passed.items() if not ok), default=None)
    passing = [step for step, ok in passed.items() if ok and (failing is None or step < failing)]
    return max(passing, default=None), failing


def next_step(passed: Mapping[int, bool], start: int = 0) -> int | None:
    """The step to measure next; None when the highest passing one is known, or there is none within bounds.

    First doublings (or halvings) until one passes and one does not, then bisection between them.
    """
    if not passed:
        return start
    low, high = bracket(passed)
    if high is None:
        assert low is not None
        return min(low + STEPS_PER_DOUBLING, HIGHEST_STEP) if low < HIGHEST_STEP else None
    if low is None:
        return max(high - STEPS_PER_DOUBLING, LOWEST_STEP) if high > LOWEST_STEP else None
    return (low + high) // 2 if high - low > 1 else None
