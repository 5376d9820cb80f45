from __future__ import annotations

import pytest

from pdserve.engine.lifetime import Event, Lifetime


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_every_latency_is_the_difference_of_two_events(clock: Clock) -> None:
    lifetime = Lifetime(clock)
    lifetime.mark(Event.ARRIVED)
    clock.now = 101.0
    lifetime.mark(Event.RESERVED)
    for choice, at in ((0, 103.0), (1, 103.5), (0, 104.0), (0, 106.0), (1, 104.5)):
        clock.now = at
        lifetime.token(choice)
    clock.now = 107.0
    lifetime.finish("ok")
    assert (lifetime.queue_s, lifetime.ttft_s, lifetime.e2e_s) == (1.0, 3.0, 7.0)
    assert sorted(lifetime.itl_s()) == [1.0, 1.0, 2.0]
    assert sorted(lifetime.tpot_s()) == [1.0, 1.5]
    assert lifetime.finished_because == "ok"


def test_only_the_first_time_of_an_event_counts(clock: Clock) -> None:
    lifetime = Lifetime(clock)
    lifetime.mark(Event.RESERVED, 1.0)
    lifetime.mark(Event.RESERVED, 2.0)
    lifetime.finish("error")
    lifetime.finish("ok")
    assert lifetime.at(Event.RESERVED) == 1.0
    assert lifetime.finished_because == "error"


def test_what_has_not_happened_has_no_latency(clock: Clock) -> None:
    lifetime = Lifetime(clock)
    lifetime.mark(Event.ARRIVED)
    assert (lifetime.queue_s, lifetime.ttft_s, lifetime.e2e_s) == (None, None, None)
    lifetime.token(0)
    assert lifetime.tpot_s() == []
    assert lifetime.itl_s() == []
