"""What the gateway counts, and what its workers report, as one Prometheus page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..engine.lifetime import Lifetime
from ..transfer.channel import FrameCounts
from ..transfer.messages import Family, Sample
from .attempt import RetryKind

METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)


class Outcome(Enum):
    """How an HTTP request for tokens ended."""

    OK = "ok"
    INVALID = "invalid"  # 4xx: the client's fault
    QUEUE_FULL = "queue_full"  # 429
    RATE_LIMITED = "rate_limited"  # 429 for more tokens than its client may use
    UNAVAILABLE = "unavailable"  # 503
    DISCONNECT = "disconnect"  # the client went away, or was cut off for not reading
    TIMEOUT = "timeout"  # 504
    ERROR = "error"  # 5xx: ours
    SHUTDOWN = "shutdown"  # cut off because the gateway stops


OUTCOME_OF_STATUS = {429: Outcome.QUEUE_FULL, 503: Outcome.UNAVAILABLE, 504: Outcome.TIMEOUT}


def outcome_of(status: int, code: str | None = None) -> Outcome:
    if code == "rate_limit_exceeded":
        return Outcome.RATE_LIMITED
    return OUTCOME_OF_STATUS.get(status, Outcome.INVALID if status < 500 else Outcome.ERROR)


class GatewayMetrics:
    """The gateway's own families. `reports` yields (worker name, role, families) of every worker alive now."""

    def __init__(self, frames: FrameCounts, reports: Callable[[], Iterable[tuple[str, str, list[Family]]]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self.ttft = Histogram(
            "pdserve_ttft_seconds", "Arrival to first token", buckets=REQUEST_BUCKETS_S, registry=registry
        )
        self.tpot = Histogram(
            "pdserve_tpot_seconds", "Mean time per output token after the first, of one choice",
            buckets=TOKEN_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.itl = Histogram("pdserve_itl_seconds", "Gap between tokens", buckets=TOKEN_BUCKETS_S, registry=registry)
        self.e2e = Histogram(
            "pdserve_e2e_seconds", "Arrival to last token", buckets=REQUEST_BUCKETS_S, registry=registry
        )
        self.queue = Histogram(
            "pdserve_queue_seconds", "Arrival to reservation", buckets=REQUEST_BUCKETS_S, registry=registry
        )
        self.inflight = Gauge("pdserve_requests_inflight", "HTTP requests for tokens being served", registry=registry)
        self.requests = Counter(
            "pdserve_requests", "HTTP requests for tokens, by how they ended", ["outcome"], registry=registry
        )
        self.retries = Counter(
            "pdserve_retries", "Attempts that ended early and were tried again", ["kind"], registry=registry
        )
        self.prompt_tokens = Counter("pdserve_prompt_tokens", "Prompt tokens of finished requests", registry=registry)
        self.generated_tokens = Counter("pdserve_generated_tokens", "Tokens accepted", registry=registry)
        self.rate_limited = Counter(
            "pdserve_rate_limited", "HTTP requests beyond a limit of their client", ["limit"], registry=registry
        )
        for limit in ("requests", "tokens", "concurrency"):
            self.rate_limited.labels(limit)
        for outcome in Outcome:
            self.requests.labels(outcome.value)
        for kind in get_args(RetryKind):
            self.retries.labels(kind)
        registry.register(_Reports(frames, reports))

    def count_retry(self, kind: str) -> None:
        self.retries.labels(kind).inc()

    def count_rate_limited(self, limit: str) -> None:
        self.rate_limited.labels(limit).inc()

    def observe(self, lifetime: Lifetime) -> None:
        """Note every latency of a request that has ended, as far as it got."""
        for histogram, value in (
            (self.queue, lifetime.queue_s),
            (self.ttft, lifetime.ttft_s),
            (self.e2e, lifetime.e2e_s if lifetime.finished_because == Outcome.OK.value else None),
        ):
            if value is not None:
                histogram.observe(value)
        for value in lifetime.tpot_s():
            self.tpot.observe(value)
        for value in lifetime.itl_s():
            self.itl.observe(value)

    def page(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class _Reports(Collector):
    """Families of the workers, with the labels `worker` and `role`; the gateway's own dropped frames among them."""

    def __init__(
        self, frames: FrameCounts, reports: Callable[[], Iterable[tuple[str, str, list[Family]]]]
    ) -> None:
        self._frames = frames
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        dropped = [
            Sample("pdserve_frames_dropped_total", {"reason": reason}, count)
            for reason, count in sorted(self._frames.dropped.items())
        ]
        own = Family("pdserve_frames_dropped", "counter", "Frames not taken", dropped)
        for worker, role, families in (("gateway", "gateway", [own]), *self._reports()):
            for family in families:
                name = family.name.removesuffix("_total") if family.type == "counter" else family.name
                metric = metrics.setdefault(name, Metric(name, family.help, family.type))
                if metric.type == family.type:
                    for sample in family.samples:
                        labels = {**sample.labels, "worker": worker, "role": role}
                        metric.add_sample(sample.name, labels, sample.value)
        yield from metrics.values()


def printable(family: Family) -> bool:
    """Would the family leave the page readable? Names come from another process."""
    return METRIC_NAME.fullmatch(family.name) is not None and all(
        METRIC_NAME.fullmatch(sample.name) and all(LABEL_NAME.fullmatch(label) for label in sample.labels)
        for sample in family.samples
    )
