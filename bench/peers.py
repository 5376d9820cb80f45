"""`bench peers`: this system, split and unsplit, and other engines on the same machine: same client, same prompts.

One after the other, each server is started, warmed up, put through the scenarios (`scenarios.py`) and ended. An engine
that is not here, does not start or fails a scenario is a row that says so, and the others go on.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from .contestants import Choice, Shape, engine
from .errors import BenchError
from .lineup import add_lineup_options, check_names, connect, contestant_of, cores_of, stop_on_sigterm
from .machine import describe_machine
from .options import fresh_seed, positive, positive_int
from .other_load import OtherLoad
from .output import command_line, figure, print_json, print_origin, report_console, table_of
from .plots import plot_bars, require_plots
from .prompts import PromptMaker, id_pieces
from .scenarios import FIGURES, SCENARIOS, Course, Figure, ScenarioFailed, ratio

DEFAULT_SHAPES = (Shape("split", 1, 1), Shape("unsplit", 0, 2))
DEFAULT_ENGINES = ("llama.cpp", "llama.cpp-tuned", "vllm-tuned")
PLOTTED = {
    "latency, one stream and sixteen (ms)": ("a ttft_ms", "a tpot_ms", "b tpot_p50_ms", "b tpot_p99_ms"),
    "throughput (tokens/s)": ("b tok_s", "c prompt_tok_s", "d-mild calm_tok_s", "d-mild tok_s", "d-over tok_s"),
    "inter-token latency of 8 streams beside long prompts (ms)": (
        "d-mild calm_itl_p99_ms", "d-mild itl_p99_ms", "d-over calm_itl_p99_ms", "d-over itl_p99_ms",
    ),
}  # fmt: skip


@dataclass
class Row:
    """What came of one contestant."""

    name: str
    ours: bool
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    start_s: float | None = None
    other_cores: float | None = None


async def _measure_one(choice: Choice, args: argparse.Namespace, maker: PromptMaker, console: Console) -> Row:
    row = Row(choice.name, ours=isinstance(choice, Shape))
    started = time.monotonic()
    try:
        async with AsyncExitStack() as stack:
            contestant = await contestant_of(choice, args)
            client, _ = await connect(stack, contestant, cores_of(args))
            if contestant.launch is not None:
                row.start_s = time.monotonic() - started
            console.print(f"{row.name}: ready after {time.monotonic() - started:.0f} s")
            course = Course(client, maker, reps=args.reps, calm_s=args.calm_s, disturbed_s=args.disturbed_s)
            async with asyncio.timeout(args.limit_s):
                await course.warm_up()
            others = OtherLoad()
            for scenario in args.scenarios:
                try:
                    async with asyncio.timeout(args.limit_s):
                        row.figures |= await course.run(scenario)
                except ScenarioFailed as error:
                    row.notes.append(f"{scenario}: {error}")
                except TimeoutError:
                    row.notes.append(f"{scenario}: not done after {args.limit_s:.0f} s")
            row.other_cores = others.cores()
    except (BenchError, ScenarioFailed) as error:
        row.notes.append(str(error))
    except TimeoutError:
        row.notes.append(f"a few short requests were not done after {args.limit_s:.0f} s")
    took = f"{time.monotonic() - started:.0f} s"
    console.print(f"{row.name}: {took}{', '.join(['', *row.notes])}", markup=False)
    return row


async def _measure(args: argparse.Namespace, maker: PromptMaker) -> list[Row]:
    stop_on_sigterm()
    console = Console(stderr=True, highlight=False)
    return [await _measure_one(choice, args, maker, console) for choice in args.chosen]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pdserve bench peers",
        description="Measure this system and other engines on this machine, one after the other. Without --shape, "
        "--server and --engine: split=1p1d, unsplit=0p2d and every engine whose program is given.",
    )
    add_lineup_options(parser)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), metavar="S,…", help="of %(default)s")
    parser.add_argument("--reps", type=positive_int, default=3, metavar="N", help="of a, b and c (%(default)s)")
    parser.add_argument(
        "--calm-s", type=positive, default=5.0, metavar="S", help="d, before long prompts (%(default)s)"
    )
    parser.add_argument("--disturbed-s", type=positive, default=20.0, metavar="S", help="d, with them (%(default)s)")
    parser.add_argument("--limit-s", type=positive, default=180.0, metavar="S", help="of one scenario (%(default)s)")
    args = parser.parse_args(arguments)
    args.scenarios = args.scenarios.split(",")
    if unknown := [scenario for scenario in args.scenarios if scenario not in SCENARIOS]:
        raise BenchError(f"--scenarios: {unknown[0]!r} is not one of {', '.join(SCENARIOS)}")
    if args.chosen is None:
        args.chosen = [*DEFAULT_SHAPES, *map(engine, DEFAULT_ENGINES)]
        if args.transformers is not None:
            args.chosen.append(engine("transformers"))
    check_names(args.chosen)
    return args


def _tables(console: Console, rows: Sequence[Row], scenarios: Sequence[str]) -> None:
    groups: dict[str, list[Figure]] = {}
    for column in FIGURES:
        if column.scenario in scenarios:
            title = column.scenario if column.scenario.startswith("d") else "streams and prompts"
            groups.setdefault(title, []).append(column)
    for title, columns in groups.items():
        cells = [
            [row.name, *(figure(row.figures.get(column.key), column.digits) for column in columns)] for row in rows
        ]
        console.print(table_of(title, ["", *(column.heading for column in columns)], cells))


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Of each server of ours, every figure as a multiple of the best engine's."""
    engines = [row.figures for row in rows if not row.ours]
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.ours:
            pairs = ((column.key, ratio(column, row.figures, engines)) for column in FIGURES)
            found[row.name] = {key: value for key, value in pairs if value is not None}
    return found


def _print_ratios(console: Console, found: Mapping[str, Mapping[str, float]]) -> None:
    columns = [column for column in FIGURES if any(column.key in mine for mine in found.values())]
    if not columns:
        return
    cells = [
        [column.full_name, f"{column.better} is better"] + [figure(mine.get(column.key), 2) for mine in found.values()]
        for column in columns
    ]
    console.print(table_of("as a multiple of the best engine", ["", "", *found], cells))


def _plot(directory: Path, rows: Sequence[Row]) -> Path:
    names = {column.key: column.full_name for column in FIGURES}
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for title, keys in PLOTTED.items():
        groups = {names[key]: {row.name: row.figures[key] for row in rows if key in row.figures} for key in keys}
        panels[title] = {name: bars for name, bars in groups.items() if bars}
    return plot_bars(directory / "peers.png", "the same client and prompts", panels)


def main(arguments: list[str]) -> int:
    """Measure, print and plot; exit code 0, 1 when no server could be measured. Raises BenchError."""
    args = parse(arguments)
    if args.plots is not None:
        require_plots(args.plots)
    seed = fresh_seed() if args.seed is None else args.seed
    machine, command = describe_machine(), command_line("peers", arguments)
    maker = PromptMaker(id_pieces(*args.token_ids), seed)
    started = time.monotonic()
    try:
        rows = asyncio.run(_measure(args, maker))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted: every server that was started has been ended", file=sys.stderr)
        return 130
    console = report_console()
    print_origin(console, machine, command)
    _tables(console, rows, args.scenarios)
    found = ratios(rows)
    _print_ratios(console, found)
    for row in rows:
        other = "" if row.other_cores is None else f"other work took {row.other_cores:.2f} cores"
        console.print(f"{row.name:<16} {'; '.join(filter(None, [other, *row.notes]))}", markup=False)
    took_s = time.monotonic() - started
    console.print(f"took         {took_s:.0f} s", markup=False)
    if args.plots is not None:
        console.print(f"plot         {_plot(args.plots, rows)}", markup=False)
    figures = {
        "seed": seed, "reps": args.reps, "calm_s": args.calm_s, "disturbed_s": args.disturbed_s, "took_s": took_s,
        "rows": [vars(row) for row in rows], "ratios": found,
    }  # fmt: skip
    print_json("peers", machine, command, figures)
    return 0 if any(row.figures for row in rows) else 1
