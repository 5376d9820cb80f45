"""What every worker counts. The gateway shows it all under its own /metrics, labelled with the worker and its role."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..transfer.channel import FrameCounts
from ..transfer.reports import Family, Sample
from .block_pool import BlockPool
from .cores import Cores

STEP_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class WorkerMetrics:
    """Counters of one worker process in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._dropped_seen: dict[str, int] = {}
        registry = self.registry
        self.kv_blocks = Gauge("pdserve_kv_blocks", "KV blocks by state", ["state"], registry=registry)
        self.kv_utilization = Gauge("pdserve_kv_cache_utilization", "Share of KV blocks held", registry=registry)
        self.prefix_cached_tokens = Counter(
            "pdserve_prefix_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.computed_tokens = Counter("pdserve_computed_tokens", "Tokens run through the model", registry=registry)
        self.frames_dropped = Counter("pdserve_frames_dropped", "Frames not taken", ["reason"], registry=registry)
        self.step_seconds = Histogram(
            "pdserve_step_seconds", "One step of the model", buckets=STEP_BUCKETS_S, registry=registry
        )

        self.leased_core_seconds = Counter(
            "pdserve_leased_core_seconds", "Time computed on neighbours' cores", registry=registry
        )
        self.compute_threads = Gauge(
            "pdserve_compute_threads", "Threads that have computed lately: 1, and 1 for each leased core",
            registry=registry,
        )  # fmt: skip

    def snapshot(self, pool: BlockPool, frames: FrameCounts, cores: Cores) -> list[Family]:
        """All families as they stand now."""
        seconds, helpers = cores.helped()
        self.leased_core_seconds.inc(seconds)
        self.compute_threads.set(1 + helpers)
        counts = pool.counts
        for state, value in (("free", counts.free), ("cached", counts.cached), ("held", counts.held)):
            self.kv_blocks.labels(state).set(value)
        self.kv_utilization.set(counts.held / pool.num_blocks)
        for reason, total in frames.dropped.items():
            self.frames_dropped.labels(reason).inc(total - self._dropped_seen.get(reason, 0))
            self._dropped_seen[reason] = total
        return [
            Family(
                metric.name,
                "counter" if metric.type == "counter" else "gauge" if metric.type == "gauge" else "histogram",
                metric.documentation,
                [Sample(s.name, s.labels, s.value) for s in metric.samples if not s.name.endswith("_created")],
            )
            for metric in self.registry.collect()
        ]
