"""What a decode worker counts beyond what every worker does."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from ..engine.metrics import WorkerMetrics

TRANSFER_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class DecodeMetrics(WorkerMetrics):
    """KV received is counted here and not at its sender, so that a sum over workers counts every byte once."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self.preemptions = Counter("pdserve_preemptions", "Sequences preempted", ["mode"], registry=registry)
        self.transfer_bytes = Counter("pdserve_transfer_bytes", "KV payload received", ["link"], registry=registry)
        self.transfer_seconds = Histogram(
            "pdserve_transfer_seconds", "First slab to handoff", buckets=TRANSFER_BUCKETS_S, registry=registry
        )
        self.local_prefill = Counter(
            "pdserve_local_prefill", "Prompts computed by a decode worker", ["reason"], registry=registry
        )
        self.steps_asking = Counter(
            "pdserve_steps_asking", "Steps that asked for the core of a busy prefill worker", registry=registry
        )
        for mode in ("swap", "move", "recompute"):
            self.preemptions.labels(mode)  # present, as 0, before the first one
        for link in ("cuda_ipc", "shm", "zmq"):
            self.transfer_bytes.labels(link)
