"""How a run is shown: live progress on stderr; a table, then one JSON line last, on stdout."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .load import Run
from .machine import Machine
from .record import monotonic
from .stats import Distribution, Summary

REFRESH_PER_S = 4.0  # drawing takes time from the client
REPORT_WIDTH = 160  # no figure is ever cut short, however narrow the terminal


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return json.dumps({"time": moment, "level": record.levelname.lower(), "message": record.getMessage()})


def setup_notes(level: str, as_json: bool) -> None:
    """Send this package's notes to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else logging.Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class LiveProgress:
    """A progress line while a run lasts; nothing where stderr is not a terminal. Use as a context manager."""

    def __init__(self, description: str, total: int | None) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=REFRESH_PER_S,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task(description, total=total, state="")
        self._total = "" if total is None else f"/{total}"

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, run: Run) -> None:
        elapsed_s = max(monotonic() - run.started_s, 1e-9)
        num_done = len(run.records)
        state = (
            f"{num_done}{self._total} done · {run.num_failed} failed · {run.num_outstanding} in flight · "
            f"{run.num_output_tokens / elapsed_s:.1f} out tok/s"
        )
        self._progress.update(self._task, completed=num_done, state=state)


def print_report(summary: Summary, settings: dict[str, Any], machine: Machine, interrupted: bool) -> None:
    """Print the table, the facts around it, and the JSON line. `settings`: what was run, for the JSON line."""
    console = Console(highlight=False, soft_wrap=True, width=REPORT_WIDTH)
    console.print(_latency_table(summary))
    for line in _facts(summary, interrupted):
        console.print(line, markup=False)
    commit = f", commit {machine.commit}" if machine.commit else ""
    console.print(
        f"machine      {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, load {machine.load_average}; "
        f"pdserve {machine.pdserve}{commit}",
        markup=False,
    )
    console.print(f"command      {settings['command']}", markup=False)
    document = {
        "bench": "serve",
        **settings,
        "interrupted": interrupted,
        **asdict(summary),
        "machine": asdict(machine),
    }
    print(json.dumps(_rounded(document)), flush=True)


def _latency_table(summary: Summary) -> Table:
    table = Table(title="latency, ms", title_justify="left")
    for heading in ("", "count", "mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    rows = [
        ("TTFT", summary.ttft_ms),
        ("TPOT", summary.tpot_ms),
        ("ITL", summary.itl_ms),
        ("end to end", summary.e2e_ms),
    ]
    if summary.send_lag_ms is not None:
        rows += [
            ("TTFT, scheduled", summary.scheduled_ttft_ms),
            ("end to end, sch.", summary.scheduled_e2e_ms),
            ("sent late by", summary.send_lag_ms),
        ]
    for name, latency in rows:
        table.add_row(name, *_cells(latency))
    return table


def _cells(latency: Distribution | None) -> list[str]:
    if latency is None:
        return ["0", *["-"] * 5]
    figures = (latency.mean, latency.p50, latency.p90, latency.p99, latency.max)
    return [str(latency.count), *(f"{figure:.1f}" for figure in figures)]


def _facts(summary: Summary, interrupted: bool) -> list[str]:
    lines = [
        f"requests     {summary.num_ok} ok, {summary.num_failed} failed, {summary.num_not_sent} not sent, "
        f"{summary.num_interrupted} interrupted, in {summary.duration_s:.2f} s",
        f"throughput   {summary.requests_per_s:.2f} requests/s, {summary.input_tokens_per_s:.1f} input tokens/s, "
        f"{summary.output_tokens_per_s:.1f} output tokens/s",
        f"tokens       {summary.input_tokens} in ({_known(summary.cached_tokens)} cached), "
        f"{summary.output_tokens} out in {summary.num_chunks} chunks",
    ]
    if summary.goodput is not None:
        limits = [
            f"{name} <= {limit:g} ms"
            for name, limit in (("TTFT", summary.goodput.slo_ttft_ms), ("TPOT", summary.goodput.slo_tpot_ms))
            if limit is not None
        ]
        lines.append(
            f"goodput      {summary.goodput.share:.1%} of requests, {summary.goodput.requests_per_s:.2f} requests/s "
            f"with {' and '.join(limits)}"
        )
    for kind, number in summary.errors.items():
        lines.append(f"error        {number} x {kind}: {summary.error_examples.get(kind, '')}")
    if summary.num_short:
        lines.append(f"warning      {summary.num_short} requests ended with fewer tokens than asked for")
    if interrupted:
        lines.append("warning      interrupted: these are the figures of what ran until then")
    return lines


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _rounded(value: Any) -> Any:
    """The same JSON value with floats cut to six significant decimals."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
