from __future__ import annotations

import pytest

from pdserve.gateway.pace import Pace, Rate


def test_rate_is_unknown_before_anything_took_time():
    rate = Rate()
    rate.add(100, 0.0)
    assert rate.per_s is None


def test_rate_follows_a_change_and_forgets_what_was():
    rate = Rate()
    for _ in range(50):
        rate.add(10, 1.0)
    assert rate.per_s == pytest.approx(10, rel=0.06)
    for _ in range(50):
        rate.add(40, 1.0)
    assert rate.per_s == pytest.approx(40, rel=0.06)


def test_speed_counts_the_time_a_prompt_was_computed_not_the_time_it_stood_behind_another():
    pace = Pace()
    for number in range(10):  # all sent at once, done one second after each other
        pace.computed(200, 100.0, 101.0 + number)
    assert pace.tokens_per_s == pytest.approx(200, rel=0.1)


def test_speed_does_not_count_idle_time():
    pace = Pace()
    for number in range(10):  # one every 60 s, done after one
        pace.computed(200, 60.0 * number, 60.0 * number + 1)
    assert pace.tokens_per_s == pytest.approx(200, rel=0.1)


def run_steps(pace: Pace, requests: int, step_s: float, count: int, now: float) -> float:
    for _ in range(count):
        now += step_s
        pace.stepped(frozenset(str(i) for i in range(requests)), now)
    return now


def test_step_is_taken_as_measured_for_as_many_requests_and_in_proportion_for_more():
    pace = Pace()
    assert pace.step_s(10) == 0.0, "unknown"
    run_steps(pace, 4, 0.02, 100, 0.0)
    assert pace.step_s(4) == pytest.approx(0.02)
    assert pace.step_s(1) == pytest.approx(0.02)
    assert pace.step_s(8) == pytest.approx(0.04)


def test_pause_between_two_batches_is_no_step():
    pace = Pace()
    now = run_steps(pace, 2, 0.02, 10, 0.0)
    pace.stepped(frozenset({"another"}), now + 1000.0)
    assert pace.step_s(1) == pytest.approx(0.02)
