"""What every bench prints around its figures: machine and command above the tables, one JSON line last."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from .machine import Machine
from .report import REPORT_WIDTH


def report_console() -> Console:
    """For stdout; no figure is cut short, however narrow the terminal."""
    return Console(highlight=False, soft_wrap=True, width=REPORT_WIDTH)


def command_line(bench: str, arguments: Sequence[str]) -> str:
    return shlex.join(["pdserve", "bench", bench, *arguments])


def print_origin(console: Console, machine: Machine, command: str) -> None:
    """What the figures were measured on, and how to measure them again."""
    commit = f", commit {machine.commit}" if machine.commit else ""
    console.print(
        f"machine      {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, load {machine.load_average}; "
        f"pdserve {machine.pdserve}{commit}",
        markup=False,
    )
    console.print(f"command      {command}", markup=False)


def table_of(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is words and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def figure(value: float | None, digits: int = 0) -> str:
    """A number for a cell; a dash for what there is not."""
    return "-" if value is None else f"{value:.{digits}f}"


def print_json(bench: str, machine: Machine, command: str, figures: dict[str, Any]) -> None:
    """The last line on stdout."""
    print(json.dumps({"bench": bench, "command": command, **figures, "machine": asdict(machine)}), flush=True)
