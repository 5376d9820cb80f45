"""Flags of what stands in front of the routes; `pdserve up` has the same ones and passes them on."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from ..transfer.errors import ConfigError
from .rate_limits import NO_LIMITS, ClientLimits

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True)
class FrontConfig:
    """`limits` hold for every client (API key, or address) that the keys file says nothing else about."""

    limits: ClientLimits = NO_LIMITS
    request_timeout_s: float | None = None
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False


def add_front_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The flags of FrontConfig."""
    parser.add_argument(
        "--requests-per-minute", type=int, metavar="N", help="of one client (API key, or address); then 429"
    )
    parser.add_argument("--tokens-per-minute", type=int, metavar="N", help="of one client, prompts and answers")
    parser.add_argument("--max-concurrent", type=int, metavar="N", help="requests of one client at once")
    parser.add_argument("--request-timeout-s", type=float, metavar="S", help="longest life of a request; then 504")
    parser.add_argument(
        "--cors-origin", action="append", metavar="ORIGIN", default=[],
        help="let pages from there use the API (https://example.org, or *); repeatable",
    )  # fmt: skip
    parser.add_argument("--log-prompts", action="store_true", help="put what clients send into the log")


def front_config(args: argparse.Namespace) -> FrontConfig:
    """Raises ConfigError."""
    for flag, value in (
        ("--requests-per-minute", args.requests_per_minute),
        ("--tokens-per-minute", args.tokens_per_minute),
        ("--max-concurrent", args.max_concurrent),
        ("--request-timeout-s", args.request_timeout_s),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} {value} is not a positive number")
    for origin in args.cors_origin:
        if ORIGIN.fullmatch(origin) is None:
            raise ConfigError(f"--cors-origin {origin} is neither * nor of the form https://example.org")
    return FrontConfig(
        limits=ClientLimits(args.requests_per_minute, args.tokens_per_minute, args.max_concurrent),
        request_timeout_s=args.request_timeout_s,
        cors_origins=tuple(args.cors_origin),
        log_prompts=args.log_prompts,
    )
