"""From records to figures: percentiles, throughput, goodput, errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .record import INTERRUPTED, NOT_SENT, RequestRecord


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % lie, linear between neighbours. `values` is sorted and not empty."""
    rank = (len(values) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (rank - low)


@dataclass(frozen=True)
class Distribution:
    """A latency over many requests or gaps, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(seconds: Iterable[float]) -> Distribution | None:
    """Summarise durations in seconds as milliseconds; None when there are none."""
    values = sorted(value * 1000 for value in seconds)
    if not values:
        return None
    return Distribution(
        count=len(values),
        mean=sum(values) / len(values),
        p50=percentile(values, 50),
        p90=percentile(values, 90),
        p99=percentile(values, 99),
        max=values[-1],
    )


@dataclass(frozen=True)
class Goodput:
    """`share` is of every request that was due, failed and unsent ones included; interrupted ones are left out."""

    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    met: int
    share: float
    requests_per_s: float


@dataclass(frozen=True)
class Summary:
    """The figures of one run. Latencies and tokens are those of successful requests only."""

    duration_s: float  # from the first request due to the last one finished
    num_due: int
    num_ok: int
    num_failed: int
    num_not_sent: int
    num_interrupted: int
    num_short: int  # succeeded with fewer tokens than asked for
    errors: dict[str, int]
    error_examples: dict[str, str]
    input_tokens: int
    cached_tokens: int | None  # None: the server does not say
    output_tokens: int
    num_chunks: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    scheduled_ttft_ms: Distribution | None  # counted from the scheduled time; open loop only
    scheduled_e2e_ms: Distribution | None
    send_lag_ms: Distribution | None  # how late this client was: sent - scheduled
    goodput: Goodput | None


def summarize(records: Sequence[RequestRecord], slo_ttft_ms: float | None, slo_tpot_ms: float | None) -> Summary:
    """All figures of a run, or of the part of it that happened before it was interrupted."""
    done = [record for record in records if record.ok]
    sent = [record for record in records if record.error != NOT_SENT]
    open_loop = [record for record in sent if record.scheduled_s is not None]
    first_s = min((record.due_s for record in records), default=0.0)
    duration_s = max((record.ended_s for record in records), default=0.0) - first_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    kinds = Counter(record.error for record in records if record.error not in ("", INTERRUPTED))
    input_tokens, output_tokens = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    known_cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    num_interrupted = sum(record.error == INTERRUPTED for record in records)
    return Summary(
        duration_s=duration_s,
        num_due=len(records),
        num_ok=len(done),
        num_failed=kinds.total() - kinds[NOT_SENT],
        num_not_sent=kinds[NOT_SENT],
        num_interrupted=num_interrupted,
        num_short=sum(record.output_tokens < record.wanted_tokens for record in done),
        errors=dict(kinds.most_common()),
        error_examples={r.error: r.detail for r in reversed(records) if r.error in kinds and r.detail},
        input_tokens=input_tokens,
        cached_tokens=sum(known_cached) if known_cached else None,
        output_tokens=output_tokens,
        num_chunks=sum(record.num_chunks for record in done),
        requests_per_s=len(done) * per_s,
        input_tokens_per_s=input_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        ttft_ms=distribution(r.ttft_s for r in done if r.ttft_s is not None),
        tpot_ms=distribution(r.tpot_s for r in done if r.tpot_s is not None),
        itl_ms=distribution(gap for record in done for gap in record.itl_s),
        e2e_ms=distribution(record.e2e_s for record in done),
        scheduled_ttft_ms=distribution(r.token_times_s[0] - r.due_s for r in open_loop if r.ok and r.token_times_s),
        scheduled_e2e_ms=distribution(record.ended_s - record.due_s for record in open_loop if record.ok),
        send_lag_ms=distribution(record.sent_s - record.due_s for record in open_loop),
        goodput=_goodput(records, slo_ttft_ms, slo_tpot_ms, len(records) - num_interrupted, per_s),
    )


def _goodput(
    records: Sequence[RequestRecord],
    slo_ttft_ms: float | None,
    slo_tpot_ms: float | None,
    num_judged: int,
    per_s: float,
) -> Goodput | None:
    if slo_ttft_ms is None and slo_tpot_ms is None:
        return None
    met = sum(record.meets(slo_ttft_ms, slo_tpot_ms) for record in records)
    return Goodput(slo_ttft_ms, slo_tpot_ms, met, met / num_judged if num_judged else 0.0, met * per_s)
