"""Flags of a prefill worker."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.worker_flags import WorkerConfig, add_worker_arguments, require_positive, worker_config


@dataclass(frozen=True)
class PrefillConfig:
    """`max_waiting`: prompts that may wait here; more are answered Busy, since the long queue is the gateway's."""

    worker: WorkerConfig
    max_waiting: int = 64


def parse_arguments(argv: Sequence[str]) -> tuple[PrefillConfig, argparse.Namespace]:
    """The config, and the flags that `main` itself needs (logging and the like). Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="pdserve.prefill", description="A prefill worker of pdserve.")
    add_worker_arguments(parser)
    parser.add_argument("--max-waiting", type=int, default=PrefillConfig.max_waiting)
    args = parser.parse_args(argv)
    require_positive(args, "max_waiting")
    return PrefillConfig(worker_config(args), args.max_waiting), args
