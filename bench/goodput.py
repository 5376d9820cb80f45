"""`bench goodput`: the highest rate at which requests are in time, of one server after another, and which to use.

1. limits   the first server, idle, answers some requests of the workload one by one; multiples of its medians are the
            limits for all (or --slo-*)
2. search   each server: open loops of the same requests at rates that double until fewer than 90 % of the requests are
            in time, then bisection (`search.py`). The highest rate that passed is its goodput (DistServe's definition)
3. fill     the others also get the rates the first was measured at, so that there is something to compare
4. verdict  the first against each of the others, in words (`verdict.py`)
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from .client import Client
from .contestants import Choice, Shape
from .errors import BenchError
from .lineup import add_lineup_options, check_names, connect, contestant_of, cores_of, stop_on_sigterm
from .machine import describe_machine
from .options import DEFAULT_TRACE_BLOCK_TOKENS, fresh_seed, positive, positive_int
from .other_load import OtherLoad
from .output import command_line, figure, print_json, print_origin, report_console, table_of
from .plots import plot_lines, require_plots
from .prompts import PromptMaker, id_pieces
from .record import RequestRecord
from .search import bracket, next_step, rate_of
from .traces import TraceRequest, read_trace
from .trial import Limits, Point, Workload, run_alone, run_trial
from .verdict import Measured, Verdict, judge

SLO_SCALE_TTFT = 5.0  # times what an idle server needs
SLO_SCALE_TPOT = 2.0
NUM_ALONE = 9
NUM_WARMUP = 3
DEFAULT_SHAPES = (Shape("split", 1, 1), Shape("unsplit", 0, 2))


@dataclass
class Campaign:
    """What holds for all servers; filled in by the first one where the user did not say."""

    workload: Workload
    maker: PromptMaker
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    base_per_s: float | None
    ends_at: float  # of the monotonic clock

    @property
    def limits(self) -> Limits:
        assert self.slo_ttft_ms is not None
        assert self.slo_tpot_ms is not None
        return Limits(self.slo_ttft_ms, self.slo_tpot_ms)

    def learn(self, alone: Sequence[RequestRecord]) -> None:
        """The limits, and where to start (at the rate of one request after another), from what an idle server did.

        Raises BenchError.
        """
        done = [record for record in alone if record.ok and record.ttft_s is not None]
        if not done:
            detail = f": {alone[0].error}: {alone[0].detail}" if alone else ""
            raise BenchError(f"it did not answer a single request{detail}")
        ttft_ms = statistics.median(record.ttft_s for record in done if record.ttft_s is not None) * 1000
        tpot_ms = [record.tpot_s * 1000 for record in done if record.tpot_s is not None]
        self.slo_ttft_ms = self.slo_ttft_ms or ttft_ms * SLO_SCALE_TTFT
        # A workload of single tokens has no TPOT to miss.
        self.slo_tpot_ms = self.slo_tpot_ms or (statistics.median(tpot_ms) * SLO_SCALE_TPOT if tpot_ms else 1e9)
        self.base_per_s = self.base_per_s or 1 / statistics.mean(record.e2e_s for record in done)


class Search:
    """The trials of one server."""

    def __init__(
        self, name: str, client: Client, context_tokens: int | None, campaign: Campaign, ends_at: float, say: Console
    ) -> None:
        self._name = name
        self._client = client
        self._context_tokens = context_tokens
        self._campaign = campaign
        self._ends_at = ends_at
        self._say = say
        self.points: dict[int, Point] = {}

    async def run(self, also: Sequence[int]) -> Measured:
        """Find the goodput; then measure the steps `also`, the lowest first, as far as time allows."""
        while (step := next_step(self._passed())) is not None and self._has_time_for(step):
            await self._try(step)
        for step in sorted(set(also) - self.points.keys()):
            if self._has_time_for(step):
                await self._try(step)
        low, high = bracket(self._passed())
        base = self._campaign.base_per_s
        assert base is not None
        goodput = 0.0 if low is None else rate_of(base, low)
        return Measured(self._name, tuple(p for _, p in sorted(self.points.items())), goodput, high is None)

    def _passed(self) -> dict[int, bool]:
        return {step: point.passed for step, point in self.points.items()}

    def _has_time_for(self, step: int) -> bool:
        """The first one is always taken. A trial lasts as long as its requests arrive, or longer."""
        assert self._campaign.base_per_s is not None
        arriving_s = len(self._campaign.workload.requests) / rate_of(self._campaign.base_per_s, step)
        return not self.points or time.monotonic() + arriving_s < self._ends_at

    async def _try(self, step: int) -> None:
        campaign = self._campaign
        assert campaign.base_per_s is not None
        rate = rate_of(campaign.base_per_s, step)
        point = await run_trial(
            self._client, campaign.workload, campaign.maker, step, rate, campaign.limits, self._context_tokens
        )
        self.points[step] = point
        self._say.print(
            f"{self._name}: {rate:.2f}/s: {point.good_share:.0%} in time, TTFT p99 {figure(point.ttft_p99_ms)} ms, "
            f"TPOT p99 {figure(point.tpot_p99_ms)} ms, {point.output_tokens_per_s:.1f} tok/s",
            markup=False,
        )


async def _measure_one(
    choice: Choice, args: argparse.Namespace, campaign: Campaign, first: Measured | None, ends_at: float, say: Console
) -> Measured:
    async with AsyncExitStack() as stack:
        client, context_tokens = await connect(stack, await contestant_of(choice, args), cores_of(args))
        await run_alone(client, campaign.workload, campaign.maker, "warmup", NUM_WARMUP, context_tokens)
        if first is None:
            campaign.learn(
                await run_alone(client, campaign.workload, campaign.maker, "alone", NUM_ALONE, context_tokens)
            )
            limits = campaign.limits
            say.print(f"limits: TTFT {limits.ttft_ms:.0f} ms, TPOT {limits.tpot_ms:.0f} ms")
        search = Search(choice.name, client, context_tokens, campaign, ends_at, say)
        return await search.run([] if first is None else [point.step for point in first.points])


async def _measure(args: argparse.Namespace, campaign: Campaign, notes: list[str]) -> list[Measured]:
    """Every server in turn; time that is left over goes to the next. What cannot be measured becomes a note."""
    stop_on_sigterm()
    say = Console(stderr=True, highlight=False)
    found: list[Measured] = []
    for i, choice in enumerate(args.chosen):
        share_s = (campaign.ends_at - time.monotonic()) / (len(args.chosen) - i)
        others = OtherLoad()
        try:
            ends_at = time.monotonic() + share_s
            found.append(await _measure_one(choice, args, campaign, found[0] if found else None, ends_at, say))
        except BenchError as error:
            notes.append(f"{choice.name}: {error}")
            say.print(notes[-1], markup=False)
            continue
        if (cores := others.cores()) is not None:
            notes.append(f"{choice.name}: other work took {cores:.2f} cores")
    return found


def workload_of(args: argparse.Namespace, seed: int) -> Workload:
    """The requests of every trial. Raises BenchError."""
    number, draw = args.requests_per_point, random.Random(f"{seed}/workload")
    scale, block_tokens, requests = args.scale_lengths, args.trace_block_tokens, []
    if args.trace is None:
        lengths = [(draw.randint(*args.input_tokens), draw.randint(*args.output_tokens)) for _ in range(number)]
        requests = [TraceRequest(float(i), *pair) for i, pair in enumerate(lengths)]
        source = "synthetic requests"
    else:
        trace = read_trace(args.trace)
        if len(trace) < number:
            raise BenchError(f"--trace {args.trace} has only {len(trace)} requests (--requests-per-point {number})")
        start = draw.randrange(len(trace) - number + 1)
        requests = trace[start : start + number]
        block_tokens = max(1, round(block_tokens / scale))
        source = f"requests {start + 1} to {start + number} of {args.trace.name}"
        source += f", lengths divided by {scale:g}" if scale != 1 else ""
    fitted = [
        TraceRequest(r.at_s, max(1, int(r.input_tokens / scale)), max(1, int(r.output_tokens / scale)), r.hash_ids)
        for r in requests
    ]
    tokens_in, tokens_out = (
        statistics.median(lengths) for lengths in ([r.input_tokens for r in fitted], [r.output_tokens for r in fitted])
    )
    what = f"{source} (median {tokens_in:.0f} tokens in, {tokens_out:.0f} out)"
    return Workload(what, fitted, block_tokens, args.timing)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    found = positive_int(low), positive_int(high or low)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"not LOW:HIGH: {text!r}")
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pdserve bench goodput",
        description="Find the highest rate at which 90 % of requests are in time, and say which server to use. "
        "Without --shape, --server and --engine: split=1p1d against unsplit=0p2d.",
    )
    add_lineup_options(parser)
    work = parser.add_argument_group("workload")
    work.add_argument("--trace", type=Path, metavar="FILE", help="an Azure CSV or Mooncake JSONL (default: synthetic)")
    work.add_argument("--scale-lengths", type=positive, default=1.0, metavar="X", help="divide its lengths by X")
    work.add_argument("--trace-block-tokens", type=positive_int, default=DEFAULT_TRACE_BLOCK_TOKENS, metavar="N",
                      help="tokens a hash id of it stands for (%(default)s)")  # fmt: skip
    work.add_argument("--timing", choices=("poisson", "trace"), default="poisson", help="of arrivals (%(default)s)")
    work.add_argument("--input-tokens", type=_range, default=(128, 128), metavar="N|LOW:HIGH", help="synthetic (128)")
    work.add_argument("--output-tokens", type=_range, default=(64, 64), metavar="N|LOW:HIGH", help="synthetic (64)")
    work.add_argument("--requests-per-point", type=positive_int, default=60, metavar="N", help="(%(default)s)")
    slo = parser.add_argument_group("search")
    slo.add_argument("--slo-ttft-ms", type=positive, metavar="MS",
                     help=f"default: {SLO_SCALE_TTFT:g} times what the first server needs when idle")  # fmt: skip
    slo.add_argument("--slo-tpot-ms", type=positive, metavar="MS", help=f"default: {SLO_SCALE_TPOT:g} times that")
    slo.add_argument("--start-rate", type=positive, metavar="R", help="first rate tried (default: from an idle server)")
    slo.add_argument("--max-minutes", type=positive, default=20.0, metavar="M", help="for all servers (%(default)s)")
    args = parser.parse_args(arguments)
    args.chosen = args.chosen or list(DEFAULT_SHAPES)
    check_names(args.chosen)
    if args.trace is None and args.scale_lengths != 1:
        raise BenchError("--scale-lengths has no effect without --trace")
    return args


def _table(server: Measured) -> list[list[str]]:
    return [
        [
            server.name, f"{p.rate_per_s:.2f}", f"{p.good_share:.0%}", figure(p.requests_per_s, 2),
            figure(p.output_tokens_per_s, 1), figure(p.ttft_p50_ms), figure(p.ttft_p99_ms), figure(p.tpot_p50_ms),
            figure(p.tpot_p99_ms), figure(p.tbt_p50_ms), figure(p.tbt_p99_ms), str(p.failed),
        ]
        for p in server.points
    ]  # fmt: skip


HEADINGS = (
    "", "rate /s", "in time", "done /s", "tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "TBT p50", "p99", "failed",
)  # fmt: skip


def _plot(directory: Path, found: Sequence[Measured], limits: Limits, what: str) -> Path:
    def lines(*names: str, scale: float = 1.0) -> dict[str, list[tuple[float, float]]]:
        return {
            f"{server.name}{label}": [
                (p.rate_per_s, value * scale) for p in server.points if (value := vars(p)[name]) is not None
            ]
            for server in found
            for name, label in zip(names, (" p50", " p99") if len(names) > 1 else ("",), strict=True)
        }

    panels = {
        "in time, % of requests": lines("good_share", scale=100),
        "throughput, tokens/s": lines("output_tokens_per_s"),
        "TTFT, ms": lines("ttft_p50_ms", "ttft_p99_ms"),
        "TPOT, ms": lines("tpot_p50_ms", "tpot_p99_ms"),
        "TBT, ms": lines("tbt_p50_ms", "tbt_p99_ms"),
    }
    marks = {"in time, % of requests": 90.0, "TTFT, ms": limits.ttft_ms, "TPOT, ms": limits.tpot_ms}
    return plot_lines(directory / "goodput.png", what, "requests/s", panels, marks, log=("TTFT, ms", "TBT, ms"))


def main(arguments: list[str]) -> int:
    """Measure, judge, print and plot; exit code 0, 1 when no server could be measured. Raises BenchError."""
    args = parse(arguments)
    if args.plots is not None:
        require_plots(args.plots)
    seed = fresh_seed() if args.seed is None else args.seed
    machine, command = describe_machine(), command_line("goodput", arguments)
    workload = workload_of(args, seed)
    maker = PromptMaker(id_pieces(*args.token_ids), seed)
    ends_at = time.monotonic() + args.max_minutes * 60
    campaign = Campaign(workload, maker, args.slo_ttft_ms, args.slo_tpot_ms, args.start_rate, ends_at)
    notes: list[str] = []
    try:
        found = asyncio.run(_measure(args, campaign, notes))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted: every server that was started has been ended", file=sys.stderr)
        return 130
    console = report_console()
    print_origin(console, machine, command)
    console.print(f"workload     {workload.what}, {args.timing} arrivals, seed {seed}", markup=False)
    verdicts: list[Verdict] = []
    if found:
        rows = [row for server in found for row in _table(server)]
        console.print(table_of("latencies in ms", HEADINGS, rows))
        verdicts = [judge(found[0], other, workload.what, campaign.limits) for other in found[1:]]
        if args.plots is not None:
            console.print(f"plot         {_plot(args.plots, found, campaign.limits, workload.what)}", markup=False)
    for note in notes:
        console.print(f"note         {note}", markup=False)
    for verdict in verdicts:
        console.print("", *verdict.lines, sep="\n", markup=False)
    figures = {
        "seed": seed, "workload": workload.what, "timing": args.timing, "notes": notes,
        "limits": asdict(campaign.limits) if found else None, "servers": [asdict(server) for server in found],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }  # fmt: skip
    print_json("goodput", machine, command, figures)
    return 0 if found else 1
