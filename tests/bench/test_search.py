"""The search for the highest rate, over servers that are a number: no clock, no sockets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.bench.search import HIGHEST_STEP, LOWEST_STEP, RESOLUTION, bracket, next_step, rate_of


def search(sustains: Callable[[float], bool], base_per_s: float = 1.0) -> tuple[dict[int, bool], list[int]]:
    """What was found, and the steps in the order in which they were tried."""
    passed: dict[int, bool] = {}
    order: list[int] = []
    while (step := next_step(passed)) is not None:
        assert step not in passed
        order.append(step)
        passed[step] = sustains(rate_of(base_per_s, step))
        assert len(order) < 40
    return passed, order


@pytest.mark.parametrize("capacity", [0.05, 0.5, 0.99, 1.0, 1.01, 3.3, 7.0, 100.0])
@pytest.mark.parametrize("base", [1.0, 0.37])
def test_the_highest_sustained_rate_is_found_within_one_step(capacity: float, base: float) -> None:
    passed, order = search(lambda rate: rate <= capacity, base)
    low, high = bracket(passed)
    assert low is not None
    assert high == low + 1
    assert rate_of(base, low) <= capacity < rate_of(base, high)
    assert rate_of(base, high) / rate_of(base, low) == pytest.approx(RESOLUTION)
    assert len(order) <= 3 + 3 + abs(low) / 8  # doublings until it is bracketed, then halves of eight steps


def test_a_server_that_never_fails_or_always_does_ends_the_search_at_a_bound() -> None:
    passed, order = search(lambda rate: True)
    assert bracket(passed) == (HIGHEST_STEP, None)
    passed, order = search(lambda rate: False)
    assert bracket(passed) == (None, LOWEST_STEP)
    assert order[:3] == [0, -8, -16]


def test_two_searches_from_one_base_meet_at_the_same_rates() -> None:
    weak, strong = (search(lambda rate, capacity=capacity: rate <= capacity)[0] for capacity in (1.5, 3.1))
    assert {0, 8} <= weak.keys() & strong.keys()


def test_a_lucky_pass_above_a_failure_does_not_count() -> None:
    assert bracket({0: True, 4: False, 8: True}) == (0, 4)
    assert next_step({0: True, 4: False, 8: True}) == 2
