"""The options of `bench serve`: one frozen dataclass, whose defaults feed the parser."""

from __future__ import annotations

import argparse
import math
import secrets
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from .errors import BenchError
from .machine import package_version
from .prompts import DEFAULT_FIRST_ID, DEFAULT_LAST_ID
from .workload import Arrival

LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_NUM_REQUESTS = 100
DEFAULT_INPUT_TOKENS = 128
DEFAULT_OUTPUT_TOKENS = 64
DEFAULT_TRACE_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class ServeConfig:
    """None means "not given"; where a default then applies, the help text says which."""

    url: str
    concurrency: int | None = None
    rate: float | None = None
    trace: Path | None = None
    speed: float | None = None
    trace_block_tokens: int | None = None
    arrival: Arrival | None = None
    model: str | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prefix_tokens: int | None = None
    tokenizer: Path | None = None
    token_ids: tuple[int, int] | None = None
    seed: int | None = None
    warmup: int = 1
    max_outstanding: int = 1024
    timeout_s: float = 600.0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    output: Path | None = None
    log_level: str = "info"
    log_json: bool = False

    @property
    def mode(self) -> Literal["concurrency", "rate", "trace"]:
        if self.trace is not None:
            return "trace"
        return "rate" if self.rate is not None else "concurrency"


def parse_options(arguments: list[str]) -> ServeConfig:
    """Parse and check the command line; exits with code 2 on a bad flag, raises BenchError on a bad combination."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    config = ServeConfig(**{field.name: values[field.name] for field in fields(ServeConfig)})
    _check(config)
    return config


def fresh_seed() -> int:
    """A seed for a run without one: a repeated run must not meet its own prompts in the server's prefix cache."""
    return secrets.randbelow(1 << 31)


def _check(config: ServeConfig) -> None:
    only_with = {
        "trace": ("speed", "trace_block_tokens"),
        "rate": ("arrival",),
        "concurrency or rate": ("input_tokens", "output_tokens", "prefix_tokens"),
    }
    values = vars(config)
    for modes, names in only_with.items():
        for name in names:
            if config.mode not in modes and values[name] is not None:
                raise BenchError(f"--{name.replace('_', '-')} has no effect with --{config.mode}")
    if config.tokenizer is not None and config.token_ids is not None:
        raise BenchError("--tokenizer and --token-ids exclude each other")
    if (config.prefix_tokens or 0) > (config.input_tokens or DEFAULT_INPUT_TOKENS):
        raise BenchError("--prefix-tokens must not exceed --input-tokens")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdserve bench serve",
        description="Load an OpenAI-compatible server with streamed /v1/completions requests and measure it.",
        epilog="The last line on stdout is one JSON object. Exit code 0; 1 when no request succeeded; "
        "2 for a usage error; 130 after Ctrl-C (which prints what there is).",
    )
    default = ServeConfig(url="")
    parser.add_argument("--url", required=True, type=http_url, help="base URL, such as http://127.0.0.1:8000")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--concurrency", type=positive_int, metavar="N", help="closed loop of N clients")
    load.add_argument("--rate", type=positive, metavar="R", help="open loop of R requests a second")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="open loop that replays an Azure CSV or Mooncake JSONL"
    )
    _add_load_options(parser, default)
    _add_prompt_options(parser)
    _add_report_options(parser, default)
    return parser


def _add_load_options(parser: argparse.ArgumentParser, default: ServeConfig) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--speed", type=positive, metavar="X", help="replay a trace X times as fast (default 1)")
    group.add_argument("--arrival", choices=get_args(Arrival), help="gaps of --rate (default poisson)")
    group.add_argument(
        "--num-requests",
        type=positive_int,
        metavar="N",
        help=f"stop sending after N (default: {DEFAULT_NUM_REQUESTS}, or no limit with --duration-s or --trace)",
    )
    group.add_argument("--duration-s", type=positive, metavar="S", help="stop sending after S seconds")
    group.add_argument(
        "--warmup", type=count, default=default.warmup, metavar="N", help="uncounted requests first (%(default)s)"
    )
    group.add_argument(
        "--max-outstanding",
        type=positive_int,
        default=default.max_outstanding,
        metavar="N",
        help="unanswered requests of an open loop; past it requests are counted, not sent (%(default)s)",
    )
    group.add_argument(
        "--timeout-s", type=positive, default=default.timeout_s, metavar="S", help="limit of one request (%(default)s)"
    )


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--model", metavar="NAME", help="default: the first one in /v1/models")
    group.add_argument(
        "--input-tokens", type=positive_int, metavar="N", help=f"prompt length (default {DEFAULT_INPUT_TOKENS})"
    )
    group.add_argument(
        "--output-tokens",
        type=positive_int,
        metavar="N",
        help=f"tokens to generate, exactly (default {DEFAULT_OUTPUT_TOKENS})",
    )
    group.add_argument("--prefix-tokens", type=count, metavar="N", help="prompt tokens that all requests share (0)")
    group.add_argument(
        "--trace-block-tokens",
        type=positive_int,
        metavar="N",
        help=f"tokens per hash id of a Mooncake trace (default {DEFAULT_TRACE_BLOCK_TOKENS}; the original has 512)",
    )
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help="make prompts of this tokenizer's common words")
    group.add_argument(
        "--token-ids",
        type=id_range,
        metavar="FIRST:LAST",
        help=f"without a tokenizer: ids to draw prompts from (default {DEFAULT_FIRST_ID}:{DEFAULT_LAST_ID})",
    )
    group.add_argument("--seed", type=count, metavar="N", help="of prompts and arrivals (default: a new one each run)")


def _add_report_options(parser: argparse.ArgumentParser, default: ServeConfig) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--slo-ttft-ms", type=positive, metavar="MS", help="goodput: limit of the first token")
    group.add_argument("--slo-tpot-ms", type=positive, metavar="MS", help="goodput: limit of the time per later token")
    group.add_argument("--output", type=Path, metavar="FILE", help="write one JSON line per request")
    group.add_argument("--version", action="version", version=f"pdserve {package_version()}")
    group.add_argument("--log-level", choices=LOG_LEVELS, default=default.log_level)
    group.add_argument("--log-json", action="store_true", help="notes on stderr as one JSON object a line")


def http_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"not an http URL: {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def positive_int(text: str) -> int:
    value = count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}")
    return int(text)


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"not a positive number: {text!r}")
    return value


def id_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    ids = count(first), count(last)
    if not ids[0] <= ids[1] < 1 << 31:
        raise argparse.ArgumentTypeError(f"not a range of token ids: {text!r}")
    return ids
