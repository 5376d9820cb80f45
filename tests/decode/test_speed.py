"""What a decode worker takes of a prompt into a step, by what its steps have taken."""

from __future__ import annotations

import pytest

from pdserve.decode.speed import LEAST_ITL_BUDGET_S, ChunkLimits, Speeds, itl_budget_s

BLOCK, MOST = 16, 256
STEP_S, SEQUENCE_S, TOKEN_S = 0.02, 0.001, 0.002


def took(running: int, prompt_tokens: int, slower: float = 1.0) -> float:
    return slower * ((STEP_S + SEQUENCE_S * running if running else 0.0) + TOKEN_S * prompt_tokens)


def seen(slo_s: float | None = None, running: tuple[int, ...] = (1, 4), slower: float = 1.0) -> Speeds:
    speeds = Speeds(ChunkLimits(MOST, BLOCK, slo_s))
    again(speeds, running, slower)
    return speeds


def again(speeds: Speeds, running: tuple[int, ...] = (1, 4), slower: float = 1.0) -> None:
    for _ in range(30):
        speeds.measured(0, MOST, took(0, MOST, slower))
        for count in running:
            speeds.measured(count, 0, took(count, 0, slower))
            speeds.measured(count, 32, took(count, 32, slower))


def test_an_idle_worker_takes_all_it_may_and_a_busy_one_what_fits() -> None:
    speeds = seen(running=(1, 4, 30))
    assert speeds.chunk_tokens(0) == MOST
    assert took(30, speeds.chunk_tokens(30)) == pytest.approx(itl_budget_s(took(30, 0)), rel=0.05)
    fast = seen(slower=0.1)
    assert fast.chunk_tokens(0, expecting=True) == pytest.approx(LEAST_ITL_BUDGET_S / (0.1 * TOKEN_S), rel=0.05)


def test_beside_sequences_a_step_becomes_twice_as_long_at_most_unless_it_is_very_short() -> None:
    assert itl_budget_s(0.1) == pytest.approx(0.2)
    assert itl_budget_s(0.002) == LEAST_ITL_BUDGET_S


def test_on_a_slow_worker_that_expects_company_steps_are_not_too_small_to_be_worth_it() -> None:
    speeds = seen(slower=20.0)
    assert speeds.chunk_tokens(4) == BLOCK
    assert speeds.chunk_tokens(0, expecting=True) == 3 * BLOCK


@pytest.mark.parametrize("slo_s", [0.06, 0.1, 0.25])
def test_steps_keep_the_slo_up_to_one_block(slo_s: float) -> None:
    speeds = seen(slo_s, running=(2, 4, 12))
    for running in (2, 3, 4, 7, 12):
        chunk = speeds.chunk_tokens(running)
        assert BLOCK <= chunk <= MOST
        assert took(running, chunk) <= slo_s * 1.02 or chunk == BLOCK
        assert speeds.report(running, 1.0).keeps_slo == (took(running, chunk) <= slo_s * 1.02), running


def test_a_block_goes_even_if_it_does_not_fit_and_is_not_called_fitting() -> None:
    speeds = seen(slo_s=0.04)
    assert speeds.chunk_tokens(4) == BLOCK
    assert not speeds.report(4, 1.0).keeps_slo


def test_nothing_keeps_an_slo_that_was_not_given() -> None:
    assert not seen(None).report(1, 1.0).keeps_slo


def test_a_worker_that_has_measured_no_prompt_yet_says_so_and_may_do_one_to_learn_its_cost() -> None:
    speeds = Speeds(ChunkLimits(MOST, BLOCK, 0.03))
    fresh = speeds.report(0, 0.0)
    assert (fresh.prompt_tokens_per_s, fresh.beside_tokens_per_s, fresh.step_s) == (0, 0, 0)
    for running in (1, 12):
        speeds.measured(running, 0, took(running, 0))
    assert speeds.report(1, 1.0).keeps_slo
    assert not speeds.report(12, 1.0).keeps_slo, "it has no time left at all"
    assert speeds.chunk_tokens(1) == BLOCK


def test_report_says_how_fast_prompts_are_alone_and_beside_what_runs() -> None:
    report = seen().report(4, 2.5)
    assert report.prompt_tokens_per_s == pytest.approx(1 / TOKEN_S, rel=0.02)
    assert report.step_s == pytest.approx(took(4, 0), rel=0.02)
    chunk = seen().chunk_tokens(4)
    assert report.beside_tokens_per_s == pytest.approx(chunk / took(4, chunk), rel=0.05)
    assert report.streaming_s == 2.5


def test_a_batch_larger_than_any_before_is_expected_to_take_no_less_than_it_does() -> None:
    speeds = seen(0.1)
    for running in (5, 8, 12):
        assert speeds.step_s(running) >= took(running, 0)
        assert took(running, speeds.chunk_tokens(running)) <= 0.1


def test_a_larger_batch_is_known_after_one_step_even_if_every_step_has_a_chunk() -> None:
    speeds = seen(0.1)
    assert speeds.chunk_tokens(12) < 20, "for want of anything better it might be slow"
    speeds.measured(12, BLOCK, took(12, BLOCK))
    assert speeds.step_s(12) == pytest.approx(took(12, 0), rel=0.05)
    assert took(12, speeds.chunk_tokens(12)) == pytest.approx(0.1, rel=0.05)


def test_an_idle_worker_reports_what_is_left_beside_one_stream() -> None:
    speeds = seen()
    assert speeds.report(0, 0.0).beside_tokens_per_s == speeds.report(1, 0.0).beside_tokens_per_s
    assert speeds.report(0, 0.0).step_s == 0.0


def test_measurements_follow_a_worker_that_becomes_slower() -> None:
    speeds = seen(0.1)
    before = speeds.report(4, 0.0)
    again(speeds, slower=2.0)
    after = speeds.report(4, 0.0)
    assert after.prompt_tokens_per_s == pytest.approx(before.prompt_tokens_per_s / 2, rel=0.1)
    assert after.step_s == pytest.approx(2 * before.step_s, rel=0.05)
    assert speeds.chunk_tokens(4) < 0.6 * seen(0.1).chunk_tokens(4)


def test_tokens_that_seem_to_cost_nothing_do_not_make_a_step_endless() -> None:
    speeds = seen(0.1, running=(4,))
    for _ in range(50):
        speeds.measured(4, 32, took(4, 0) / 2)  # a hiccup made the steps without a prompt look slow
    assert speeds.chunk_tokens(4) <= MOST
    for _ in range(20):
        speeds.measured(4, 0, took(4, 0))
        speeds.measured(4, 32, took(4, 32))
    assert took(4, speeds.chunk_tokens(4)) <= 0.11


def test_the_last_few_tokens_of_a_prompt_do_not_count() -> None:
    speeds = seen()
    before = speeds.report(4, 0.0)
    for _ in range(20):
        speeds.measured(4, 1, 0.2)
        speeds.measured(0, 1, 0.2)
    assert speeds.report(4, 0.0) == before


def test_an_slo_without_bounds_takes_the_most_and_no_more() -> None:
    speeds = seen(slo_s=1e308)
    assert speeds.chunk_tokens(4) == MOST
    assert speeds.report(4, 1.0).keeps_slo


def test_speed_alone_on_the_machine_is_not_forgotten_while_neighbours_are_busy() -> None:
    speeds = Speeds(ChunkLimits(MOST, BLOCK))
    speeds.measured(0, MOST, 1.0, helped_s=0.0)
    assert speeds.report(0, 0.0, borrows=True).lone_tokens_per_s == 0.0, "not known yet"
    assert speeds.report(0, 0.0, borrows=False).lone_tokens_per_s == pytest.approx(MOST)
    speeds.measured(0, MOST, 0.5, helped_s=0.4)
    for _ in range(20):
        speeds.measured(0, MOST, 1.0, helped_s=0.1)
    report = speeds.report(0, 0.0, borrows=True)
    assert report.lone_tokens_per_s == pytest.approx(2 * MOST)
    assert report.prompt_tokens_per_s == pytest.approx(MOST, rel=0.05)
