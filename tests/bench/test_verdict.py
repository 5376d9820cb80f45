"""The verdict says who wins, by how much, and does not flatter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.bench.search import RESOLUTION
from pdserve.bench.trial import Limits, Point
from pdserve.bench.verdict import Measured, compare, judge

LIMITS = Limits(1000, 100)
POINT = Point(
    step=0, rate_per_s=1.0, num_requests=60, good_share=1.0, late_first=0, late_rest=0, failed=0, requests_per_s=1.0,
    output_tokens_per_s=50.0, ttft_p50_ms=200, ttft_p99_ms=400, tpot_p50_ms=40, tpot_p99_ms=60, tbt_p50_ms=50,
    tbt_p99_ms=90,
)  # fmt: skip
OVER = replace(POINT, step=8, rate_per_s=2.0, good_share=0.4, late_rest=30, late_first=6, output_tokens_per_s=80.0)


def measured(name: str, goodput: float, *points: Point, open_ended: bool = False) -> Measured:
    return Measured(name, points, goodput, open_ended)


def test_a_win_is_said_with_its_size_and_its_consequence() -> None:
    mine, theirs = replace(POINT, ttft_p50_ms=300, tpot_p50_ms=30), POINT
    verdict = judge(
        measured("split", 1.5, mine, replace(OVER, output_tokens_per_s=100.0)), measured("unsplit", 1.0, theirs, OVER),
        "chat (128 in, 64 out)", LIMITS,
    )  # fmt: skip
    text = "\n".join(verdict.lines)
    assert verdict.outcome == "wins"
    assert verdict.goodput_ratio == pytest.approx(1.5)
    assert "For chat (128 in, 64 out)" in text
    assert "split wins by 50% over unsplit: goodput 1.50 against 1.00 requests/s" in text
    assert "At 1.00 requests/s, which both sustain" in text
    assert "TTFT p50 300 / 200 ms (worse, +50%)" in text
    assert "TPOT p50 30 / 40 ms (better, -25%)" in text
    assert "throughput 50.0 / 50.0 tokens/s (the same)" in text
    assert "TBT p99 90 / 90 ms (the same)" in text
    assert "never below 100% of unsplit's" in text
    assert text.endswith("So use split for this workload.")


def test_a_loss_is_said_as_plainly() -> None:
    slow = replace(OVER, step=0, rate_per_s=1.0, late_first=50, late_rest=2, output_tokens_per_s=40.0)
    verdict = judge(measured("split", 0.5, slow), measured("unsplit", 1.0, POINT, OVER), "this", LIMITS)
    text = "\n".join(verdict.lines)
    assert verdict.outcome == "loses"
    assert "split loses by 50% to unsplit" in text
    assert "which not both sustain" in text
    assert "throughput 40.0 / 50.0 tokens/s (worse, -20%)" in text
    assert "in split is, at 1.00 requests/s, that first tokens are late" in text
    assert "(50 of 60)" in text
    assert "in unsplit is, at 2.00 requests/s, that later tokens are slow" in text
    assert text.endswith("So split does not pay for this workload: use unsplit.")
    assert verdict.lowest_throughput_share == pytest.approx(0.8)


def test_one_step_of_the_search_is_a_tie_and_two_are_not() -> None:
    assert compare(1.0, RESOLUTION) == compare(RESOLUTION, 1.0) == compare(1.0, 1.0) == "ties"
    assert compare(RESOLUTION**2, 1.0) == "wins"
    assert compare(1.0, RESOLUTION**2) == "loses"
    assert compare(0.0, 0.0) == "ties"
    assert compare(0.1, 0.0) == "wins"


def test_level_servers_are_told_apart_by_their_latencies() -> None:
    mine = replace(POINT, ttft_p50_ms=300, ttft_p99_ms=600, tbt_p99_ms=45)
    verdict = judge(measured("split", 1.0, mine), measured("unsplit", 1.0, POINT), "this", LIMITS)
    assert verdict.outcome == "ties"
    assert "is level with" in verdict.lines[0]
    assert verdict.lines[-1] == (
        "So choose by what your readers notice: split is better in TBT p99, and worse in TTFT p50, TTFT p99."
    )
    worse = replace(POINT, tpot_p99_ms=90)
    assert judge(measured("split", 1.0, worse), measured("unsplit", 1.0, POINT), "this", LIMITS).lines[-1] == (
        "So use unsplit: at equal rate split is worse in TPOT p99, and better in nothing."
    )
    assert (
        "So use split: at equal rate it is better in TPOT p99"
        in (judge(measured("split", 1.0, POINT), measured("unsplit", 1.0, worse), "this", LIMITS).lines[-1])
    )
    same = judge(measured("split", 1.0, POINT), measured("unsplit", 1.0, POINT), "this", LIMITS)
    assert "does not matter" in same.lines[-1]


def test_servers_without_goodput_or_without_an_end_are_described_so() -> None:
    lost = judge(measured("split", 0.0, OVER), measured("unsplit", 1.0, POINT, open_ended=True), "this", LIMITS)
    assert "loses to unsplit: goodput no against at least 1.00 requests/s" in lost.lines[0]
    assert "no common rate" in lost.lines[1]
    won = judge(measured("split", 1.0, POINT), measured("unsplit", 0.0, OVER), "this", LIMITS)
    assert won.goodput_ratio is None
    assert "wins over unsplit" in won.lines[0]
    both = judge(measured("split", 0.0, OVER), measured("unsplit", 0.0, OVER), "this", LIMITS)
    assert both.lines[0].endswith("neither split nor unsplit is in time at any rate that was tried.")
