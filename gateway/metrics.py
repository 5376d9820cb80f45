"""What the gateway counts, and what its workers report, as one Prometheus page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..engine.lifetime import Lifetime
from ..transfer.channel import FrameCounts
from ..transfer.reports import Family, Sample
from .attempt import RetryKind
from .elastic import Where

METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
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


@dataclass(frozen=True)
class Report:
    """What one worker has counted, and the labels that say whose it is."""

    labels: Mapping[str, str]
    families: Sequence[Family]


class GatewayMetrics:
    """The gateway's own families. `reports` yields those of every worker alive now.

    The label `model` is the model that serves a request; empty for what is refused before that is known.
    """

    def __init__(self, frames: FrameCounts, reports: Callable[[], Iterable[Report]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry(auto_describe=False)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"pdserve_{name}_seconds", help, ["model"], buckets=buckets, registry=registry)

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"pdserve_{name}", help, [*labels, "model"], registry=registry)

        self.ttft = histogram("ttft", "Arrival to first token", REQUEST_BUCKETS_S)
        self.tpot = histogram("tpot", "Mean time per output token after the first, of one choice", TOKEN_BUCKETS_S)
        self.itl = histogram("itl", "Gap between tokens", TOKEN_BUCKETS_S)
        self.e2e = histogram("e2e", "Arrival to last token", REQUEST_BUCKETS_S)
        self.queue = histogram("queue", "Arrival to reservation", REQUEST_BUCKETS_S)
        self.inflight = Gauge("pdserve_requests_inflight", "HTTP requests for tokens being served", registry=registry)
        self.requests = counter("requests", "HTTP requests for tokens, by how they ended", "outcome")
        self.retries = counter("retries", "Attempts that ended early and were tried again", "kind")
        self.prefill_choices = counter(
            "prefill_choices", "Who computed the prompt of an attempt, and why", "where", "reason"
        )
        self.prediction = Histogram(
            "pdserve_ttft_prediction_ratio",
            "Time from a place to the first token, over what it was predicted to be",
            ["where", "model"], buckets=RATIO_BUCKETS, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self.generated_tokens = counter("generated_tokens", "Tokens accepted")
        self.rate_limited = Counter(
            "pdserve_rate_limited", "HTTP requests beyond a limit of their client", ["limit"], registry=registry
        )
        for limit in ("requests", "tokens", "concurrency"):
            self.rate_limited.labels(limit)
        for outcome in Outcome:
            self.requests.labels(outcome.value, "")
        registry.register(_Reports(frames, reports))

    def of(self, model: str) -> ModelMetrics:
        """The series of one model, which are there from now on."""
        for outcome in Outcome:
            self.requests.labels(outcome.value, model)
        return ModelMetrics(
            model=model,
            ttft=self.ttft.labels(model),
            tpot=self.tpot.labels(model),
            itl=self.itl.labels(model),
            e2e=self.e2e.labels(model),
            queue=self.queue.labels(model),
            prompt_tokens=self.prompt_tokens.labels(model),
            generated_tokens=self.generated_tokens.labels(model),
            prefill_choices=self.prefill_choices,
            prediction={where: self.prediction.labels(where, model) for where in get_args(Where)},
            retries={kind: self.retries.labels(kind, model) for kind in get_args(RetryKind)},
        )

    def count_rate_limited(self, limit: str) -> None:
        self.rate_limited.labels(limit).inc()

    def page(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


@dataclass(frozen=True)
class ModelMetrics:
    """What is counted of one model's requests."""

    model: str
    ttft: Histogram
    tpot: Histogram
    itl: Histogram
    e2e: Histogram
    queue: Histogram
    prompt_tokens: Counter
    generated_tokens: Counter
    prefill_choices: Counter  # of all models
    prediction: Mapping[Where, Histogram]
    retries: Mapping[RetryKind, Counter]

    def count_retry(self, kind: RetryKind) -> None:
        self.retries[kind].inc()

    def count_choice(self, where: Where, reason: str) -> None:
        self.prefill_choices.labels(where, reason, self.model).inc()

    def observe_prediction(self, where: Where, predicted_s: float, observed_s: float) -> None:
        if predicted_s > 0:
            self.prediction[where].observe(observed_s / predicted_s)

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


class _Reports(Collector):
    """Families of the workers, labelled with whose they are; the gateway's own dropped frames among them."""

    def __init__(self, frames: FrameCounts, reports: Callable[[], Iterable[Report]]) -> None:
        self._frames = frames
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        dropped = [
            Sample("pdserve_frames_dropped_total", {"reason": reason}, count)
            for reason, count in sorted(self._frames.dropped.items())
        ]
        own = Family("pdserve_frames_dropped", "counter", "Frames not taken", dropped)
        for report in (Report({"worker": "gateway", "role": "gateway"}, [own]), *self._reports()):
            for family in report.families:
                name = family.name.removesuffix("_total") if family.type == "counter" else family.name
                metric = metrics.setdefault(name, Metric(name, family.help, family.type))
                if metric.type == family.type:
                    for sample in family.samples:
                        metric.add_sample(sample.name, {**sample.labels, **report.labels}, sample.value)
        yield from metrics.values()


def printable(family: Family) -> bool:
    """Would the family leave the page readable? Names come from another process."""
    return METRIC_NAME.fullmatch(family.name) is not None and all(
        METRIC_NAME.fullmatch(sample.name) and all(LABEL_NAME.fullmatch(label) for label in sample.labels)
        for sample in family.samples
    )
