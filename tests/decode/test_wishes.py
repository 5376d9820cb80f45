"""When a decode worker asks for a busy neighbour's core: as often as its streams need it, and no more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter

from pdserve.decode import wishes
from pdserve.decode.wishes import MOST_IN_A_ROW, Need, Wishes
from pdserve.engine.cores import Cores

ALONE_S, HELPED_S = 0.037, 0.024
STEPS = 2000


def run(slo_s: float, steps: int = STEPS) -> tuple[float, list[bool]]:
    """(mean length of steps, which of them asked) where asking helps that much."""
    need, asked, total_s = Need(slo_s), [], 0.0
    for _ in range(steps):
        asked.append(need.asks)
        length_s = HELPED_S if asked[-1] else ALONE_S
        need.measured(length_s, asked=asked[-1])
        total_s += length_s
    return total_s / steps, asked


@pytest.mark.parametrize("slo_s", [0.028, 0.030, 0.033, 0.036])
def test_steps_take_as_long_as_the_slo_on_average(slo_s: float) -> None:
    mean_s, asked = run(slo_s)
    assert mean_s == pytest.approx(slo_s, rel=0.003)
    assert sum(asked) / STEPS == pytest.approx((ALONE_S - slo_s) / (ALONE_S - HELPED_S), abs=0.01)


@pytest.mark.parametrize("slo_s", [0.038, 1.0])
def test_nobody_is_asked_while_the_slo_is_kept(slo_s: float) -> None:
    assert not any(run(slo_s)[1])


@pytest.mark.parametrize("slo_s", [0.0001, 0.020, 0.025])
def test_one_step_in_four_does_not_ask_however_little_it_helps(slo_s: float) -> None:
    _, asked = run(slo_s)
    for start in range(STEPS - MOST_IN_A_ROW):
        assert not all(asked[start : start + MOST_IN_A_ROW + 1])
    assert sum(asked) / STEPS == pytest.approx(0.75, abs=0.01)


def test_one_long_step_is_made_up_for_by_a_few_and_not_for_ever() -> None:
    need = Need(0.040)
    for _ in range(20):
        need.measured(ALONE_S, asked=False)
    need.measured(60.0, asked=False)
    assert need.asks
    for _ in range(40):
        need.measured(ALONE_S, asked=need.asks)
    assert not need.asks


def test_a_fresh_worker_asks_nobody() -> None:
    assert not Need(0.001).asks


class Neighbour(Cores):
    """One that can be asked, if it is busy."""

    def __init__(self) -> None:
        super().__init__(None, None, ())
        self.busy_there = True
        self.asked = False

    def ask(self) -> bool:
        self.asked = self.busy_there
        return self.asked

    def ask_no_more(self) -> None:
        self.asked = False


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, slo_s: float | None) -> None:
        self.now = 100.0
        monkeypatch.setattr(wishes, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.cores = Neighbour()
        self.count = Counter("asked", "", registry=CollectorRegistry())
        self.wishes = Wishes(self.cores, slo_s, self.count)

    def step(self, seconds: float, streams: int = 8, prompt_tokens: int = 0) -> bool:
        """Whether it asked while it ran."""
        with self.wishes.step(streams, prompt_tokens):
            asked = self.cores.asked
            self.now += seconds
        assert not self.cores.asked, "the wish ends with the step"
        return asked

    @property
    def counted(self) -> float:
        return self.count._value.get()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch, 0.025)


def test_without_an_slo_nobody_is_ever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, None)
    assert not any(rig.step(10.0) for _ in range(50))
    assert rig.counted == 0


def test_steps_that_ask_are_counted_and_there_is_none_where_nobody_can_be_asked(rig: Rig) -> None:
    asked = sum(rig.step(0.03) for _ in range(50))
    assert asked > 30
    assert rig.counted == asked
    rig.cores.busy_there = False
    assert not any(rig.step(0.03) for _ in range(50))
    assert rig.counted == asked


def test_prompts_and_idle_times_are_no_need(rig: Rig) -> None:
    assert not any(rig.step(0.03, streams=0, prompt_tokens=64) for _ in range(20))
    for _ in range(20):
        assert not rig.step(0.2, prompt_tokens=16)
        assert not rig.step(0.02)
        rig.now += 10.0
        rig.wishes.pause()
    assert rig.counted == 0


def test_a_step_with_a_part_of_a_prompt_does_not_ask(rig: Rig) -> None:
    for _ in range(10):
        rig.step(0.03)
    assert not any(rig.step(0.03, prompt_tokens=16) for _ in range(10))
    assert rig.step(0.03)


def test_a_step_that_fails_asks_no_more(rig: Rig) -> None:
    for _ in range(5):
        rig.step(0.03)
    with pytest.raises(ValueError, match="cancelled"):  # noqa: PT012
        for _ in range(4):
            rig.step(0.03)
            with rig.wishes.step(8, 0):
                if rig.cores.asked:
                    raise ValueError("cancelled")
    assert not rig.cores.asked
