from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.engine.lifetime import Event, Lifetime
from pdserve.gateway.metrics import GatewayMetrics, Outcome, Report, outcome_of, printable
from pdserve.transfer.channel import FrameCounts
from pdserve.transfer.reports import Family, Sample
from tests.gateway.fake_worker import counter

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(metrics: GatewayMetrics) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.page().decode())
        for sample in family.samples
    }


def of(worker: str, role: str, families: list[Family]) -> Report:
    return Report({"worker": worker, "role": role}, families)


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_every_family_of_the_gateway_is_there_before_the_first_request() -> None:
    metrics = GatewayMetrics(FrameCounts(), list)
    metrics.of("m")
    names = {name for name, _ in series(metrics)}
    assert names >= {
        "pdserve_ttft_seconds_bucket", "pdserve_tpot_seconds_bucket", "pdserve_itl_seconds_bucket",
        "pdserve_e2e_seconds_bucket", "pdserve_queue_seconds_bucket", "pdserve_requests_inflight",
        "pdserve_requests_total", "pdserve_retries_total",
    }  # fmt: skip


def test_worker_families_are_labelled_and_a_dead_workers_series_vanish() -> None:
    histogram = Family("pdserve_x_seconds", "histogram", "h", [Sample("pdserve_x_seconds_count", {}, 3.0)])
    reports = [
        of("d0", "decode", [counter("pdserve_transfer_bytes", 7, link="zmq"), histogram]),
        of("d1", "decode", [counter("pdserve_transfer_bytes", 9, link="zmq")]),
        of("p0", "prefill", [counter("pdserve_other", 1)]),
    ]
    metrics = GatewayMetrics(FrameCounts(), lambda: reports)
    seen = series(metrics)
    assert seen[key("pdserve_transfer_bytes_total", link="zmq", worker="d0", role="decode")] == 7
    assert seen[key("pdserve_transfer_bytes_total", link="zmq", worker="d1", role="decode")] == 9
    assert seen[key("pdserve_x_seconds_count", worker="d0", role="decode")] == 3
    assert seen[key("pdserve_other_total", worker="p0", role="prefill")] == 1
    assert metrics.page().decode().count("# TYPE pdserve_transfer_bytes_total counter") == 1
    reports.pop(0)
    assert not [labels for _, labels in series(metrics) if ("worker", "d0") in labels]


def test_frames_dropped_by_the_gateway_stand_beside_those_of_its_workers() -> None:
    frames = FrameCounts()
    frames.drop("malformed")
    theirs = of("d0", "decode", [counter("pdserve_frames_dropped", 2, reason="parts")])
    metrics = GatewayMetrics(frames, lambda: [theirs])
    seen = series(metrics)
    own = key("pdserve_frames_dropped_total", reason="malformed", worker="gateway", role="gateway")
    assert seen[own] == 1
    assert seen[key("pdserve_frames_dropped_total", reason="parts", worker="d0", role="decode")] == 2


def test_families_that_would_spoil_the_page_are_not_printable() -> None:
    assert printable(counter("pdserve_x", 1, link="any text\n at all"))
    assert not printable(counter("bad name", 1))
    assert not printable(Family("ok", "gauge", "", [Sample("ok", {"bad label": "x"}, 1.0)]))
    assert not printable(Family("ok", "gauge", "", [Sample("evil{} 1\n", {}, 1.0)]))


def test_latencies_are_observed_once_per_request_and_e2e_only_of_finished_ones() -> None:
    metrics = GatewayMetrics(FrameCounts(), list)
    for outcome in (Outcome.OK, Outcome.DISCONNECT):
        lifetime = Lifetime()
        lifetime.mark(Event.ARRIVED)
        lifetime.mark(Event.RESERVED)
        for _ in range(4):
            lifetime.token(0)
        lifetime.finish(outcome.value)
        metrics.of("m").observe(lifetime)
    seen = series(metrics)
    names = ("queue", "ttft", "tpot", "itl", "e2e")
    counts = {name: seen[key(f"pdserve_{name}_seconds_count", model="m")] for name in names}
    assert counts == {"queue": 2, "ttft": 2, "tpot": 2, "itl": 6, "e2e": 1}


def test_who_computed_a_prompt_is_counted_with_the_reason_and_predictions_are_held_against_the_times() -> None:
    metrics = GatewayMetrics(FrameCounts(), list)
    counts = metrics.of("m")
    counts.count_choice("decode", "idle")
    counts.observe_prediction("decode", 0.5, 0.6)
    counts.observe_prediction("decode", 0.0, 0.6)
    seen = series(metrics)
    assert seen[key("pdserve_prefill_choices_total", where="decode", reason="idle", model="m")] == 1
    ratio = "pdserve_ttft_prediction_ratio"
    assert seen[key(f"{ratio}_count", where="decode", model="m")] == 1, "nothing is a multiple of no time"
    assert seen[key(f"{ratio}_sum", where="decode", model="m")] == pytest.approx(1.2)
    assert seen[key(f"{ratio}_count", where="prefill", model="m")] == 0


def test_outcomes_follow_the_status() -> None:
    outcomes = {400: "invalid", 404: "invalid", 429: "queue_full", 500: "error", 503: "unavailable"}
    assert {status: outcome_of(status).value for status in outcomes} == outcomes
