"""Flags of a decode worker."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ..engine.graphs import GraphMode
from ..engine.kv_cache import parse_size
from ..engine.memory import host_available_bytes
from ..engine.worker_flags import WorkerConfig, add_worker_arguments, require_positive, worker_config
from ..transfer.channel import check_exposed, runtime_directory
from ..transfer.errors import ConfigError
from .preemption import PreemptionMode


@dataclass(frozen=True)
class DecodeConfig:
    """`itl_slo_s`: how long a step with a chunk of a prompt in it may take, as far as one block allows; and streams may
    wait for a token, on average, before a busy prefill worker's core is asked for. None: nothing was promised, such
    steps take about `speed.itl_budget_s`, and nobody is asked."""

    worker: WorkerConfig
    bulk_address: str
    peer_address: str
    advertised: tuple[str, str] | None = None  # (bulk, control) that prefill workers shall connect to, if others
    max_sequences: int = 64
    local_tokens: int = 32
    itl_slo_s: float | None = None
    transfer_deadline_s: float = 30.0
    preemption: PreemptionMode = "auto"
    swap_bytes: int = 0
    cuda_graphs: GraphMode = "auto"

    def advertise(self, bound: tuple[str, str]) -> tuple[str, str]:
        """The addresses others shall use for the bound ones (they differ behind NAT or when bound to a wildcard)."""
        return self.advertised or bound


def swap_size(text: str) -> int:
    """Bytes of --swap-memory. Raises ConfigError for more than there is."""
    size = parse_size(text) if text != "0" else 0
    if size > (available := host_available_bytes(Path("/proc"), Path("/sys/fs/cgroup"))):
        raise ConfigError(f"--swap-memory {text} is {size} bytes, but only {available} are available")
    return size


def listen_addresses(listen: str | None, name: str) -> tuple[str, str]:
    """(bulk, control) addresses for --listen: ipc by default; a tcp port stands for itself and the one after it."""
    if listen is None:
        listen = f"ipc://{runtime_directory()}/{name}-{os.getpid()}"
    if listen.startswith("ipc:///"):
        return f"{listen}.bulk", f"{listen}.ctl"
    match = re.fullmatch(r"(tcp://.+):(\d{1,5})", listen)
    if not match or int(match[2]) > 65534:
        raise ConfigError(f"--listen {listen} is not of the form ipc:///PATH or tcp://HOST:PORT")
    port = int(match[2])
    return f"{match[1]}:{port}", f"{match[1]}:{port + 1 if port else 0}"


def parse_arguments(argv: Sequence[str]) -> tuple[DecodeConfig, argparse.Namespace]:
    """The config, and the flags that `main` itself needs (logging and the like). Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="pdserve.decode", description="A decode worker of pdserve.")
    add_worker_arguments(parser)
    parser.add_argument("--listen", help="tcp://HOST:PORT for slabs, PORT+1 for control, or ipc:///PATH (default)")
    parser.add_argument("--advertise", help="what prefill workers shall connect to, if not --listen (same form)")
    parser.add_argument("--max-sequences", type=int, default=DecodeConfig.max_sequences)
    parser.add_argument(
        "--local-tokens", type=int, default=DecodeConfig.local_tokens,
        help="prompts that miss at most this many tokens are computed here when local prefill is allowed",
    )  # fmt: skip
    parser.add_argument(
        "--itl-slo-ms", type=float,
        help="compute prompts beside streams, in parts that keep a step within this, and ask prefill workers for their "
        "cores while a token takes longer (default: leave prompts and cores to them)",
    )  # fmt: skip
    parser.add_argument("--transfer-deadline-s", type=float, default=DecodeConfig.transfer_deadline_s)
    parser.add_argument(
        "--preemption", choices=get_args(PreemptionMode), default=DecodeConfig.preemption,
        help="how a preempted sequence comes back: auto is swap while there is room, else by way of the prefill pool",
    )  # fmt: skip
    parser.add_argument("--swap-memory", default="512M", help="host memory for swapped KV (0: none)")
    parser.add_argument(
        "--cuda-graphs", choices=get_args(GraphMode), default=DecodeConfig.cuda_graphs,
        help="on a GPU, capture decode steps at start-up and replay them",
    )  # fmt: skip
    args = parser.parse_args(argv)
    require_positive(args, "max_sequences", "transfer_deadline_s")
    if args.itl_slo_ms is not None:
        require_positive(args, "itl_slo_ms")
    worker = worker_config(args)
    bulk, peer = listen_addresses(args.listen, args.name)
    check_exposed(bulk, args.insecure, worker.curve)
    config = DecodeConfig(
        worker=worker,
        bulk_address=bulk,
        peer_address=peer,
        advertised=listen_addresses(args.advertise, args.name) if args.advertise else None,
        max_sequences=args.max_sequences,
        local_tokens=args.local_tokens,
        itl_slo_s=None if args.itl_slo_ms is None else args.itl_slo_ms / 1e3,
        transfer_deadline_s=args.transfer_deadline_s,
        preemption=args.preemption,
        swap_bytes=swap_size(args.swap_memory),
        cuda_graphs=args.cuda_graphs,
    )
    return config, args
