"""One rate: arrival times, prompts, and what counts as in time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pdserve.bench.prompts import PromptMaker, id_pieces
from pdserve.bench.record import RequestRecord
from pdserve.bench.traces import TraceRequest
from pdserve.bench.trial import Limits, Workload, evenly, point_of, tbt_s

MAKER = PromptMaker(id_pieces(100, 999), seed=3)
BURSTY = [TraceRequest(at_s, 20, 4, (1, 2 + i)) for i, at_s in enumerate((5.0, 5.0, 6.0, 15.0))]


def record(due_s: float, times_s: list[float], error: str = "") -> RequestRecord:
    return RequestRecord(0, 8, len(times_s), due_s, due_s, max([due_s, *times_s]), times_s, error=error)


def test_trace_timing_keeps_the_shape_of_arrivals_and_has_the_rate() -> None:
    times = Workload("", BURSTY, 16, "trace").times(rate_per_s=2.0, seed=0)
    assert times == pytest.approx([0.0, 0.0, 0.15, 1.5])
    assert (len(times) - 1) / times[-1] == pytest.approx(2.0)


def test_requests_that_all_arrive_at_once_are_sent_at_once() -> None:
    assert Workload("", BURSTY[:2], 16, "trace").times(5.0, 0) == [0.0, 0.0]


def test_poisson_arrivals_at_another_rate_are_the_same_ones_faster() -> None:
    workload = Workload("", BURSTY, 16, "poisson")
    slow, fast = workload.times(1.0, seed=4), workload.times(4.0, seed=4)
    assert slow == pytest.approx([at_s * 4 for at_s in fast])
    assert all(a < b for a, b in pairwise(slow))


def test_prompts_are_the_same_for_every_server_and_others_at_every_rate() -> None:
    workload = Workload("", BURSTY, 16, "trace")
    times = workload.times(1.0, 0)
    first, again, other = (workload.plan(MAKER, stream, times, None) for stream in ("step/1", "step/1", "step/2"))
    assert first == again
    assert {tuple(p.prompt) for p in first}.isdisjoint(tuple(p.prompt) for p in other)
    assert first[0].prompt[:16] == first[1].prompt[:16]  # the trace's common blocks
    assert first[0].prompt[:16] != other[0].prompt[:16]
    assert first[0].prompt[16:] != first[1].prompt[16:]


def test_lengths_are_cut_to_the_model_of_the_server() -> None:
    planned = Workload("", BURSTY, 16, "trace").plan(MAKER, "x", [None] * 4, 16)
    assert all(len(p.prompt) + p.output_tokens <= 16 for p in planned)


def test_tbt_is_the_mean_of_the_longest_tenth_of_the_gaps() -> None:
    times = [float(i) for i in range(20)] + [29.0, 33.0]  # 21 gaps: nineteen of 1, one of 10, one of 4
    assert tbt_s(record(0.0, times)) == pytest.approx(7.0)
    assert tbt_s(record(0.0, [0.0, 1.0, 4.0])) == 3.0
    assert tbt_s(record(0.0, [1.0])) is None


def test_a_point_counts_what_was_late_and_what_failed_against_all_that_was_due() -> None:
    records = [
        record(10.0, [10.1, 10.2, 10.3]),
        record(10.5, [11.6, 11.7, 11.8]),  # its first token is late
        record(11.0, [11.1, 11.9, 12.7]),  # the others are slow
        record(11.0, [], error="http_503"),
    ]
    point = point_of(3, 2.0, records, Limits(ttft_ms=1000, tpot_ms=500))
    assert (point.good_share, point.late_first, point.late_rest, point.failed) == (0.25, 1, 1, 1)
    assert not point.passed
    assert point.ttft_p50_ms == pytest.approx(100)
    assert point.output_tokens_per_s == pytest.approx(9 / 2.7)
    assert point.requests_per_s == pytest.approx(3 / 2.7)
    assert point_of(3, 2.0, records[:1], Limits(1000, 500)).passed


def test_a_point_without_any_answer_has_no_latencies() -> None:
    point = point_of(0, 1.0, [record(1.0, [], "connect"), record(2.0, [], "connect")], Limits(1, 1))
    assert (point.good_share, point.failed, point.ttft_p50_ms, point.tbt_p99_ms) == (0, 2, None, None)


def test_what_is_measured_alone_is_spread_over_all_lengths() -> None:
    plan = Workload("", [TraceRequest(0.0, n, 1) for n in range(1, 61)], 16, "poisson").plan(
        MAKER, "x", [None] * 60, None
    )
    picked = [len(planned.prompt) for planned in evenly(plan, 9)]
    assert (picked[0], picked[-1], len(picked), len(set(picked))) == (1, 60, 9, 9)
    assert picked[4] in (30, 31)
    assert evenly(plan[:2], 9) == plan[:2]
    assert evenly(plan[:3], 1) == plan[:1]
