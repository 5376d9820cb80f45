"""What a prefill worker counts beyond what every worker does: which links it has, and which it could not have."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter, Gauge

from ..engine.block_pool import BlockPool
from ..engine.cores import Cores
from ..engine.metrics import WorkerMetrics
from ..transfer.channel import FrameCounts
from ..transfer.reports import Family
from ..transfer.sender import LinkState, PeerLink


class PrefillMetrics(WorkerMetrics):
    def __init__(self) -> None:
        super().__init__()
        self._aside_seen_s = 0.0
        self.stood_aside_seconds = Counter(
            "pdserve_stood_aside_seconds", "Time that streams had the core they asked for", registry=self.registry
        )
        self.links = Gauge("pdserve_links", "Decode workers linked", ["link"], registry=self.registry)
        self.link_refusals = Gauge(
            "pdserve_link_refusals", "Decode workers to which a better link cannot be used, by reason (text: /pools)",
            ["link", "reason"], registry=self.registry,
        )  # fmt: skip

    def snapshot_with(
        self, links: Iterable[PeerLink], pool: BlockPool, frames: FrameCounts, cores: Cores
    ) -> list[Family]:
        """All families as they stand now."""
        self.links.clear()
        self.link_refusals.clear()
        for link in links:
            if link.state is LinkState.LINKED:
                self.links.labels(link.link).inc()
            if link.refusal is not None:
                self.link_refusals.labels(link.refusal.link, link.refusal.reason).inc()
        self.stood_aside_seconds.inc((aside_s := cores.aside_s()) - self._aside_seen_s)
        self._aside_seen_s = aside_s
        return self.snapshot(pool, frames, cores)
