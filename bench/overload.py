"""`bench overload`: does a server that is asked for more than it can do still do what it can?

1. alone     one client gives the latencies of an idle server; without --slo-* flags the limits are multiples of them
2. ramp      closed loops of 1, 2, 4, … clients until fewer than half of the requests meet the limits; the best goodput
             among those where 90 % did is the *sustainable rate*
3. factors   an open loop at each multiple of that rate; goodput counts the requests due within the loop that met both
             limits. What is still unanswered when it could no longer meet them is abandoned, as a user would
4. probe     after each, one client again: has the server come back?

The figure that matters is goodput at a multiple above 1 as a share of goodput at 1: a server that collapses spends its
time on requests that are too late already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice, takewhile

from rich.console import Console
from rich.table import Table

from .client import Client, find_model, open_session
from .errors import BenchError
from .load import Run
from .machine import describe_machine
from .options import (
    DEFAULT_INPUT_TOKENS,
    DEFAULT_OUTPUT_TOKENS,
    LOG_LEVELS,
    count,
    fresh_seed,
    http_url,
    positive,
    positive_int,
)
from .prompts import DEFAULT_FIRST_ID, DEFAULT_LAST_ID, PromptMaker, id_pieces
from .record import INTERRUPTED, RequestRecord
from .report import REPORT_WIDTH, setup_notes
from .stats import percentile
from .workload import PlannedRequest, arrival_times, synthetic

SLO_SCALE_TTFT = 5.0  # limits are this many times what one request alone needs
SLO_SCALE_TPOT = 4.0
SUSTAINED_SHARE = 0.9
HOPELESS_SHARE = 0.5
NUM_PROBES = 3
MAX_CONCURRENCY = 256
MAX_OUTSTANDING = 4096
SPARE_S = 1.0  # beyond the limits, for an answer on its way
PAUSE_S = 0.5  # between two loops: what was abandoned is let go of


@dataclass(frozen=True)
class OverloadConfig:
    url: str
    model: str | None
    input_tokens: int
    output_tokens: int
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    rate: float | None
    factors: tuple[float, ...]
    duration_s: float
    ramp_s: float
    seed: int


@dataclass(frozen=True)
class Limits:
    """A request's answer is good when both hold."""

    ttft_ms: float
    tpot_ms: float

    def good(self, record: RequestRecord) -> bool:
        return record.meets(self.ttft_ms, self.tpot_ms)

    def patience_s(self, output_tokens: int) -> float:
        """After this long an answer cannot be good any more."""
        return (self.ttft_ms + self.tpot_ms * output_tokens) / 1000 + SPARE_S


@dataclass(frozen=True)
class Level:
    """One open loop. Percentiles are over the requests that got an answer, ms."""

    factor: float
    rate: float
    num_due: int
    num_good: int
    goodput: float
    num_refused: int  # 429 and 503
    num_abandoned: int
    num_other: int  # any other failure
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    refused_p99_ms: float | None  # how long a client waited for its refusal
    probe_ttft_ms: float | None  # afterwards, alone; None: the probe failed
    errors: dict[str, int]


class Overload:
    """The whole measurement, against one server."""

    def __init__(self, config: OverloadConfig, client: Client) -> None:
        self._config = config
        self._client = client
        self._maker = PromptMaker(id_pieces(DEFAULT_FIRST_ID, DEFAULT_LAST_ID), config.seed)

    def _plan(self, stream: str, times: Iterator[float] | None = None) -> Iterator[PlannedRequest]:
        config = self._config
        return synthetic(
            self._maker,
            stream,
            input_tokens=config.input_tokens,
            output_tokens=config.output_tokens,
            prefix_tokens=0,
            times=times,
        )

    async def alone(self, stream: str, number: int = NUM_PROBES) -> list[RequestRecord]:
        """The successful ones among a few requests, one after another."""
        run = Run(self._client)
        await run.closed_loop(islice(self._plan(stream), number), concurrency=1)
        return [record for record in run.records if record.ok]

    async def limits(self) -> Limits:
        """From the flags, or from the best of a few requests alone. Raises BenchError when they fail."""
        await self.alone("warmup", 1)
        records = await self.alone("alone")
        if not records:
            raise BenchError("the server did not answer a single request")
        ttft_ms = min(r.ttft_s for r in records if r.ttft_s is not None) * 1000 * SLO_SCALE_TTFT
        tpot_ms = min((r.tpot_s for r in records if r.tpot_s is not None), default=1.0) * 1000 * SLO_SCALE_TPOT
        return Limits(self._config.slo_ttft_ms or ttft_ms, self._config.slo_tpot_ms or tpot_ms)

    async def sustainable(self, limits: Limits) -> tuple[float, list[tuple[int, float, float]]]:
        """The best goodput of closed loops, and (clients, good share, goodput) of each."""
        found: list[tuple[int, float, float]] = []
        clients = 1
        while clients <= MAX_CONCURRENCY:
            run = Run(self._client)
            await run.closed_loop(self._plan(f"ramp/{clients}"), concurrency=clients, duration_s=self._config.ramp_s)
            took_s = max(record.ended_s for record in run.records) - run.started_s
            good = sum(map(limits.good, run.records))
            found.append((clients, good / len(run.records), good / took_s))
            if good < HOPELESS_SHARE * len(run.records):
                break
            clients *= 2
        rate = max((goodput for _, share, goodput in found if share >= SUSTAINED_SHARE), default=0.0)
        if rate == 0:
            raise BenchError(f"there is no load at which 90 % of the requests meet {limits}")
        return rate, found

    async def level(self, factor: float, rate: float, limits: Limits) -> Level:
        """An open loop at `factor` times `rate`."""
        config = self._config
        stream = f"factor/{factor:g}"
        times = arrival_times(factor * rate, "poisson", config.seed)
        plan = list(takewhile(lambda p: p.at_s is not None and p.at_s <= config.duration_s, self._plan(stream, times)))
        run = Run(self._client)
        with suppress(TimeoutError):
            async with asyncio.timeout(config.duration_s + limits.patience_s(config.output_tokens)):
                await run.open_loop(iter(plan), max_outstanding=MAX_OUTSTANDING)
        await asyncio.sleep(PAUSE_S)
        probes = await self.alone(f"probe/{factor:g}", 1)
        probe_ttft_s = probes[0].ttft_s if probes else None
        records = run.records
        good = sum(map(limits.good, records))
        refused = [r for r in records if r.error in ("http_429", "http_503")]
        abandoned = sum(r.error == INTERRUPTED for r in records)
        begun = [r for r in records if r.token_times_s]
        ttft_ms = [(r.token_times_s[0] - r.due_s) * 1000 for r in begun]
        tpot_ms = [r.tpot_s * 1000 for r in begun if r.ok and r.tpot_s is not None]
        return Level(
            factor=factor,
            rate=factor * rate,
            num_due=len(records),
            num_good=good,
            goodput=good / config.duration_s,
            num_refused=len(refused),
            num_abandoned=abandoned,
            num_other=sum(not r.ok for r in records) - len(refused) - abandoned,
            ttft_p50_ms=_percentile(ttft_ms, 50),
            ttft_p99_ms=_percentile(ttft_ms, 99),
            tpot_p50_ms=_percentile(tpot_ms, 50),
            tpot_p99_ms=_percentile(tpot_ms, 99),
            refused_p99_ms=_percentile([r.e2e_s * 1000 for r in refused], 99),
            probe_ttft_ms=None if probe_ttft_s is None else probe_ttft_s * 1000,
            errors=dict(Counter(r.error for r in records if not r.ok)),
        )


def _percentile(values: list[float], percent: float) -> float | None:
    return percentile(sorted(values), percent) if values else None


async def _measure(config: OverloadConfig) -> tuple[Limits, float, list[tuple[int, float, float]], list[Level]]:
    console = Console(stderr=True, highlight=False)
    async with open_session(timeout_s=600.0) as session:
        model = await find_model(session, config.url, config.model)
        overload = Overload(config, Client(session, config.url, model.name))
        limits = await overload.limits()
        console.print(f"limits: TTFT {limits.ttft_ms:.0f} ms, TPOT {limits.tpot_ms:.0f} ms")
        ramp: list[tuple[int, float, float]] = []
        rate = config.rate
        if rate is None:
            rate, ramp = await overload.sustainable(limits)
        console.print(f"sustainable: {rate:.2f} requests/s")
        levels = []
        for factor in config.factors:
            level = await overload.level(factor, rate, limits)
            console.print(f"{factor:g}x: {level.num_good} of {level.num_due} good, {level.goodput:.2f}/s")
            levels.append(level)
    return limits, rate, ramp, levels


def parse_options(arguments: Sequence[str]) -> OverloadConfig:
    parser = argparse.ArgumentParser(
        prog="pdserve bench overload",
        description="Load a server beyond what it can do and measure how much of it is still in time.",
    )
    parser.add_argument("--url", required=True, type=http_url, help="base URL, such as http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="default: the first one in /v1/models")
    parser.add_argument("--input-tokens", type=positive_int, default=DEFAULT_INPUT_TOKENS, metavar="N")
    parser.add_argument("--output-tokens", type=positive_int, default=DEFAULT_OUTPUT_TOKENS, metavar="N")
    parser.add_argument(
        "--slo-ttft-ms", type=positive, metavar="MS", help=f"default: {SLO_SCALE_TTFT:g} times that of one alone"
    )
    parser.add_argument(
        "--slo-tpot-ms", type=positive, metavar="MS", help=f"default: {SLO_SCALE_TPOT:g} times that of one alone"
    )
    parser.add_argument("--rate", type=positive, metavar="R", help="the sustainable rate (default: measured)")
    parser.add_argument(
        "--factors", default="0.5,1,2,3", metavar="F,F,…", help="multiples of the sustainable rate (%(default)s)"
    )
    parser.add_argument("--duration-s", type=positive, default=30.0, metavar="S", help="of each open loop")
    parser.add_argument("--ramp-s", type=positive, default=8.0, metavar="S", help="of each closed loop")
    parser.add_argument("--seed", type=count, metavar="N", help="of prompts and arrivals (default: a new one each run)")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="warning")
    parser.add_argument("--log-json", action="store_true")
    args = parser.parse_args(arguments)
    setup_notes(args.log_level, args.log_json)
    try:
        factors = tuple(positive(part) for part in args.factors.split(","))
    except argparse.ArgumentTypeError as error:
        raise BenchError(f"--factors: {error}") from None
    return OverloadConfig(
        url=args.url,
        model=args.model,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        slo_ttft_ms=args.slo_ttft_ms,
        slo_tpot_ms=args.slo_tpot_ms,
        rate=args.rate,
        factors=factors,
        duration_s=args.duration_s,
        ramp_s=args.ramp_s,
        seed=fresh_seed() if args.seed is None else args.seed,
    )


def _table(levels: Sequence[Level]) -> Table:
    base = next((level.goodput for level in levels if level.factor == 1), 0.0)
    table = Table(title="overload (ms, requests/s)", title_justify="left")
    headings = (
        "load", "rate", "due", "good", "goodput", "of 1x", "refused", "abandoned", "failed", "TTFT p50", "p99",
        "TPOT p50", "p99", "refusal p99", "probe TTFT",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for level in levels:
        latencies = (
            level.ttft_p50_ms, level.ttft_p99_ms, level.tpot_p50_ms, level.tpot_p99_ms, level.refused_p99_ms,
            level.probe_ttft_ms,
        )  # fmt: skip
        table.add_row(
            f"{level.factor:g}x", f"{level.rate:.2f}", str(level.num_due), str(level.num_good), f"{level.goodput:.2f}",
            f"{level.goodput / base:.0%}" if base else "-", str(level.num_refused), str(level.num_abandoned),
            str(level.num_other), *("-" if value is None else f"{value:.0f}" for value in latencies),
        )  # fmt: skip
    return table


def main(arguments: list[str]) -> int:
    """Measure and print; exit code 0. Raises BenchError for what cannot be run."""
    config = parse_options(arguments)
    machine = describe_machine()
    limits, rate, ramp, levels = asyncio.run(_measure(config))
    console = Console(highlight=False, soft_wrap=True, width=REPORT_WIDTH)
    console.print(_table(levels))
    command = shlex.join(["pdserve", "bench", "overload", *arguments])
    console.print(f"limits       TTFT <= {limits.ttft_ms:.0f} ms and TPOT <= {limits.tpot_ms:.0f} ms", markup=False)
    console.print(f"sustainable  {rate:.2f} requests/s ({len(ramp)} closed loops)", markup=False)
    console.print(f"machine      {machine.cpu}, {machine.cores} cores, load {machine.load_average}", markup=False)
    console.print(f"command      {command}", markup=False)
    document = {
        "bench": "overload", "command": command, **asdict(config), "limits": asdict(limits),
        "sustainable_per_s": rate, "ramp": ramp, "levels": [asdict(level) for level in levels],
        "machine": asdict(machine),
    }  # fmt: skip
    print(json.dumps(document), flush=True)
    return 0
