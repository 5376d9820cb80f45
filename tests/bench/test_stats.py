from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.record import INTERRUPTED, NOT_SENT, RequestRecord
from pdserve.bench.stats import distribution, percentile, summarize

finite = st.floats(0, 1e6)


def record(
    index: int = 0,
    *,
    sent_s: float = 0.0,
    times_s: tuple[float, ...] = (),
    ended_s: float = 0.0,
    scheduled_s: float | None = None,
    error: str = "",
    wanted: int | None = None,
) -> RequestRecord:
    made = RequestRecord(index, 10, len(times_s) if wanted is None else wanted, scheduled_s, sent_s)
    made.ended_s, made.token_times_s, made.error = ended_s, list(times_s), error
    made.num_chunks = len(times_s)
    return made


@given(st.lists(finite, min_size=2))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    values.sort()
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert percentile(values, percent) == pytest.approx(cuts[percent - 1], rel=1e-9, abs=1e-9)


@given(st.lists(finite, min_size=1))
def test_a_distribution_is_ordered_and_ends_at_its_extremes(seconds: list[float]) -> None:
    summary = distribution(seconds)
    assert summary is not None
    assert summary.count == len(seconds)
    assert min(seconds) * 1000 <= summary.p50 <= summary.p90 <= summary.p99 <= summary.max == max(seconds) * 1000


def test_one_value_is_every_percentile_and_no_value_is_no_distribution() -> None:
    summary = distribution([0.25])
    assert summary is not None
    assert (summary.mean, summary.p50, summary.p99, summary.max) == (250, 250, 250, 250)
    assert distribution([]) is None


def test_latencies_are_differences_of_the_times_of_a_request() -> None:
    one = record(sent_s=10.0, times_s=(10.5, 10.6, 10.9), ended_s=11.0)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.2)
    assert one.itl_s == pytest.approx([0.1, 0.3])
    assert one.e2e_s == pytest.approx(1.0)


def test_tokens_that_share_a_chunk_have_no_gap_between_them() -> None:
    one = record(times_s=(1.0, 1.0, 1.4, 1.4), ended_s=2.0)
    assert one.itl_s == pytest.approx([0, 0.4, 0])
    assert sum(one.itl_s) == pytest.approx((one.tpot_s or 0) * 3)


def test_a_single_token_has_no_tpot() -> None:
    assert record(times_s=(1.0,), ended_s=1.0).tpot_s is None


def test_the_servers_token_count_wins_over_the_number_of_chunks() -> None:
    one = record(times_s=(1.0, 2.0), ended_s=2.0)
    one.reported_output_tokens = 5
    assert one.output_tokens == 5
    assert one.tpot_s == pytest.approx(0.25)


def test_failed_requests_are_counted_by_kind_and_kept_out_of_the_latencies() -> None:
    failed = [record(i, times_s=(50.0,), ended_s=60.0, error=kind) for i, kind in enumerate(["timeout", "http_429"])]
    failed[0].detail = "not finished"
    unsent = record(3, error=NOT_SENT)
    summary = summarize([record(4, times_s=(1.0, 2.0), ended_s=2.0), *failed, failed[1], unsent], None, None)
    assert (summary.num_due, summary.num_ok, summary.num_failed, summary.num_not_sent) == (5, 1, 3, 1)
    assert summary.errors == {"http_429": 2, "timeout": 1, NOT_SENT: 1}
    assert summary.error_examples["timeout"] == "not finished"
    assert summary.ttft_ms is not None
    assert (summary.ttft_ms.count, summary.ttft_ms.max) == (1, 1000)
    assert summary.output_tokens == 2


def test_throughput_is_over_the_time_from_first_due_to_last_ended() -> None:
    records = [
        record(0, sent_s=5.0, times_s=(6.0, 7.0), ended_s=7.0),
        record(1, sent_s=8.0, times_s=(9.0,), ended_s=9.0),
    ]
    summary = summarize(records, None, None)
    assert summary.duration_s == 4
    assert summary.output_tokens_per_s == pytest.approx(3 / 4)
    assert summary.input_tokens_per_s == pytest.approx(20 / 4)
    assert summary.requests_per_s == pytest.approx(2 / 4)


def test_scheduled_latencies_include_the_time_a_request_waited_to_be_sent() -> None:
    late = record(scheduled_s=1.0, sent_s=3.0, times_s=(3.5,), ended_s=4.0)
    summary = summarize([late], None, None)
    assert summary.ttft_ms is not None
    assert summary.scheduled_ttft_ms is not None
    assert summary.scheduled_e2e_ms is not None
    assert summary.send_lag_ms is not None
    assert (summary.ttft_ms.max, summary.scheduled_ttft_ms.max) == (500, 2500)
    assert (summary.scheduled_e2e_ms.max, summary.send_lag_ms.max) == (3000, 2000)


def test_a_closed_loop_has_no_scheduled_latencies() -> None:
    summary = summarize([record(times_s=(1.0,), ended_s=1.0)], None, None)
    assert summary.scheduled_ttft_ms is None
    assert summary.send_lag_ms is None


def test_goodput_needs_both_limits_and_judges_failed_requests_but_not_interrupted_ones() -> None:
    records = [
        record(0, times_s=(0.1, 0.2), ended_s=0.2),  # meets both
        record(1, times_s=(0.9, 1.0), ended_s=1.0),  # slow first token
        record(2, times_s=(0.1, 2.0), ended_s=2.0),  # slow tokens
        record(3, scheduled_s=-1.0, sent_s=0.0, times_s=(0.1,), ended_s=0.2),  # sent late
        record(4, error="timeout"),
        record(5, error=NOT_SENT),
        record(6, error=INTERRUPTED),
    ]
    goodput = summarize(records, 500, 500).goodput
    assert goodput is not None
    assert goodput.met == 1
    assert goodput.share == pytest.approx(1 / 6)
    assert goodput.requests_per_s == pytest.approx(1 / 3)
    without_tpot = summarize(records, 500, None).goodput
    assert without_tpot is not None
    assert without_tpot.met == 2
    assert summarize(records, None, None).goodput is None


def test_nothing_at_all_still_summarises() -> None:
    summary = summarize([], 1, 1)
    assert (summary.num_due, summary.duration_s, summary.requests_per_s) == (0, 0, 0)
    assert summary.ttft_ms is None
