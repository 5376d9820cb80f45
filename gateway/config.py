"""Flags of the gateway."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from ..engine.config import add_common_arguments
from ..transfer.channel import check_exposed, runtime_directory
from ..transfer.errors import ConfigError
from ..transfer.keys import Curve, load_keys
from .aliases import Alias
from .api.chat_output import ChatStyle
from .front_flags import FrontConfig, add_front_arguments, front_config
from .model_flags import (
    ModelSource,
    add_model_arguments,
    add_per_model,
    add_style_arguments,
    aliases_of,
    chat_styles,
    models_of,
    per_model,
)
from .router import LocalPrefillMode, PolicyName


@dataclass(frozen=True)
class GatewayConfig:
    """`listen`: where workers connect; None stands for an ipc socket of this user's, named after the port."""

    models: tuple[ModelSource, ...]
    aliases: tuple[Alias, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    listen: str | None = None
    max_queue: int = 1024
    queue_timeout_s: float = 60.0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    local_prefill: LocalPrefillMode = "auto"
    router_policy: PolicyName = "prefix_aware"
    chat_templates: Mapping[str, Path] = field(default_factory=dict)  # by the model's name
    chat_styles: Mapping[str, ChatStyle] = field(default_factory=dict)
    keep_alive_s: float = 10.0
    trust_remote_code: bool = False
    max_model_lens: Mapping[str, int] = field(default_factory=dict)
    max_body_bytes: int = 32 * 1024 * 1024
    death_bound_s: float = 5.0
    shutdown_s: float = 30.0
    debug_endpoints: bool = False
    max_connections: int = 4096
    api_keys: Path | None = None
    curve: Curve | None = None
    front: FrontConfig = field(default_factory=FrontConfig)

    def control_address(self, port: int) -> str:
        """Where workers connect, given the HTTP port that was bound in the end."""
        return self.listen or f"ipc://{runtime_directory()}/gw-{port}"


def build_parser() -> argparse.ArgumentParser:
    defaults = GatewayConfig
    parser = argparse.ArgumentParser(prog="pdserve.gateway", description="The HTTP front of pdserve.")
    add_common_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--host", default=defaults.host)
    parser.add_argument("--port", type=int, default=defaults.port, help="0 takes any free one")
    parser.add_argument("--listen", help="ipc:// or tcp:// address for workers (default: ipc, named after the port)")
    parser.add_argument("--max-queue", type=int, default=defaults.max_queue, help="waiting requests before a 429")
    parser.add_argument("--queue-timeout-s", type=float, default=defaults.queue_timeout_s, help="wait before a 503")
    parser.add_argument("--ttft-slo-s", type=float, help="refuse what would wait longer than this for its first token")
    parser.add_argument("--tpot-slo-s", type=float, help="run no more at once than get a token each within this")
    parser.add_argument(
        "--local-prefill", choices=get_args(LocalPrefillMode), default=defaults.local_prefill,
        help="may decode workers compute prompts themselves?",
    )  # fmt: skip
    parser.add_argument("--router-policy", choices=get_args(PolicyName), default=defaults.router_policy)
    add_per_model(parser, "--chat-template", "FILE", "Jinja template instead of the model's")
    add_style_arguments(parser)
    parser.add_argument(
        "--keep-alive-s", type=float, default=defaults.keep_alive_s, help="silence on a stream before a comment is sent"
    )
    add_per_model(parser, "--max-model-len", "TOKENS", "longest prompt + output (default: the workers')")
    parser.add_argument("--max-body-bytes", type=int, default=defaults.max_body_bytes, help="larger bodies get a 413")
    parser.add_argument(
        "--max-connections", type=int, default=defaults.max_connections, help="open at a time; the next one gets a 503"
    )
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="let only these in (`pdserve keys api NAME`)")
    add_front_arguments(parser)
    parser.add_argument(
        "--death-bound-s", type=float, default=defaults.death_bound_s, help="a worker silent for longer is dead"
    )
    parser.add_argument(
        "--shutdown-s", type=float, default=defaults.shutdown_s, help="time for open requests to finish after SIGTERM"
    )
    parser.add_argument("--debug-endpoints", action="store_true", help="serve /debug/requests (to this machine only)")
    return parser


def parse_arguments(argv: Sequence[str]) -> tuple[GatewayConfig, argparse.Namespace]:
    """The config, and the flags that `main` itself needs (logging and the like). Raises ConfigError."""
    args = build_parser().parse_args(argv)
    models = models_of(args)
    max_model_lens = per_model("--max-model-len", args.max_model_len, models, int)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port} is not a port number")
    if args.max_queue < 0:
        raise ConfigError(f"--max-queue {args.max_queue} is negative")
    for flag, value in (
        ("--queue-timeout-s", args.queue_timeout_s),
        ("--ttft-slo-s", args.ttft_slo_s),
        ("--tpot-slo-s", args.tpot_slo_s),
        ("--death-bound-s", args.death_bound_s),
        ("--max-body-bytes", args.max_body_bytes),
        ("--shutdown-s", args.shutdown_s),
        ("--keep-alive-s", args.keep_alive_s),
        ("--max-connections", args.max_connections),
        *(("--max-model-len", longest) for longest in max_model_lens.values()),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} {value} is not a positive number")
    curve = load_keys(args.keys) if args.keys else None
    if args.listen is not None:
        if not args.listen.startswith(("ipc://", "tcp://")):
            raise ConfigError(f"--listen {args.listen} is neither an ipc:// nor a tcp:// address")
        check_exposed(args.listen, args.insecure, curve)
    config = GatewayConfig(
        models=models,
        aliases=aliases_of(args, models),
        host=args.host,
        port=args.port,
        listen=args.listen,
        max_queue=args.max_queue,
        queue_timeout_s=args.queue_timeout_s,
        ttft_slo_s=args.ttft_slo_s,
        tpot_slo_s=args.tpot_slo_s,
        local_prefill=args.local_prefill,
        router_policy=args.router_policy,
        chat_templates=per_model("--chat-template", args.chat_template, models, Path),
        chat_styles=chat_styles(args, models),
        keep_alive_s=args.keep_alive_s,
        trust_remote_code=args.trust_remote_code,
        max_model_lens=max_model_lens,
        max_body_bytes=args.max_body_bytes,
        death_bound_s=args.death_bound_s,
        shutdown_s=args.shutdown_s,
        debug_endpoints=args.debug_endpoints,
        max_connections=args.max_connections,
        api_keys=args.api_keys,
        curve=curve,
        front=front_config(args),
    )
    return config, args
