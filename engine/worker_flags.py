"""Flags that prefill and decode workers share, checked and frozen."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Literal, get_args

from ..transfer.channel import check_exposed
from ..transfer.errors import ConfigError
from ..transfer.keys import Curve, load_keys
from ..transfer.links import LinkMode
from ..transfer.offers import MAX_RING_BYTES, MIN_RING_BYTES
from ..transfer.ring import DEFAULT_RING_BYTES
from .config import add_common_arguments
from .kv_cache import parse_size
from .setup import EngineConfig, add_engine_arguments, engine_config

LeaseMode = Literal["auto", "never"]
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class WorkerConfig:
    """Who a worker is, whom it serves, and how it takes its turns."""

    name: str
    gateways: tuple[str, ...]
    engine: EngineConfig
    chunk_tokens: int = 256
    death_bound_s: float = 5.0
    drain_timeout_s: float = 30.0
    cpu: int | None = None
    check_invariants: bool = False
    curve: Curve | None = None
    link: LinkMode = "auto"
    lease_cores: LeaseMode = "auto"
    ring_bytes: int = DEFAULT_RING_BYTES


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    add_engine_arguments(parser)
    parser.add_argument("--gateway", action="append", required=True, help="control address of a gateway (repeatable)")
    parser.add_argument("--name", required=True, help="unique name of this worker")
    parser.add_argument("--chunk-tokens", type=int, default=WorkerConfig.chunk_tokens, help="prompt tokens in one step")
    parser.add_argument("--death-bound-s", type=float, default=WorkerConfig.death_bound_s)
    parser.add_argument(
        "--drain-timeout-s", type=float, default=WorkerConfig.drain_timeout_s,
        help="how long requests may take to finish or move after SIGTERM; the same signal again ends them at once",
    )  # fmt: skip
    parser.add_argument(
        "--link", choices=get_args(LinkMode), default=WorkerConfig.link,
        help="how KV moves: auto is cuda_ipc (GPUs) or shm (shared memory, processors) on one machine, else zmq",
    )  # fmt: skip
    parser.add_argument(
        "--ring-memory", default=f"{DEFAULT_RING_BYTES >> 20}M",
        help="of each link: shared memory (shm) of a prefill worker, device memory (cuda_ipc) of a decode worker",
    )  # fmt: skip
    parser.add_argument("--cpu", type=int, help="pin to this core")
    parser.add_argument(
        "--lease-cores", choices=get_args(LeaseMode), default=WorkerConfig.lease_cores,
        help="auto: a pinned worker computes on idle neighbours' cores, too, and lends its own while it is idle",
    )  # fmt: skip
    parser.add_argument("--check-invariants", action="store_true", help="prove the block states every step")


def require_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError for a flag that is not above zero, or has no end."""
    for name in names:
        value = vars(args)[name]
        if not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {value} is not a positive number")


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """What `add_worker_arguments` parsed. Raises ConfigError."""
    if not NAME_PATTERN.fullmatch(args.name):
        raise ConfigError(f"--name {args.name!r} must be 1-64 letters, digits, dots, dashes or underscores")
    require_positive(args, "chunk_tokens", "death_bound_s", "drain_timeout_s")
    curve = load_keys(args.keys) if args.keys else None
    for address in args.gateway:
        if not re.fullmatch(r"(ipc://.+|tcp://.+:\d{1,5})", address):
            raise ConfigError(f"--gateway {address} is not of the form ipc://PATH or tcp://HOST:PORT")
        check_exposed(address, args.insecure, curve)
    ring_bytes = parse_size(args.ring_memory)
    if not MIN_RING_BYTES <= ring_bytes <= MAX_RING_BYTES:
        raise ConfigError(f"--ring-memory {args.ring_memory} is not between {MIN_RING_BYTES} bytes and 1T")
    return WorkerConfig(
        name=args.name,
        gateways=tuple(args.gateway),
        engine=engine_config(args),
        chunk_tokens=args.chunk_tokens,
        death_bound_s=args.death_bound_s,
        drain_timeout_s=args.drain_timeout_s,
        cpu=args.cpu,
        check_invariants=args.check_invariants,
        curve=curve,
        link=args.link,
        lease_cores=args.lease_cores,
        ring_bytes=ring_bytes,
    )
