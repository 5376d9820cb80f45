"""What a section of the device check says, how it looks as a table, and what the device was."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from ..kernels.triton_choice import interpreting

WHOLE = "whole section"  # the check that stands for one that broke off, or was not run
NOT_RUN = "not run"  # how a note begins that says why
WRONG = "WRONG"

PACKAGES = ("torch", "triton", "cupy-cuda13x", "transformers", "pyzmq")


@dataclass(frozen=True)
class Setting:
    """What the sections run on. `dry`: on the CPU, tiny, to see that the check itself is whole."""

    device: torch.device
    dry: bool

    def triton(self) -> AbstractContextManager[None]:
        """Within it Triton's kernels are taken: on a GPU they are anyway, in a dry run they are interpreted."""
        return interpreting() if self.dry else nullcontext()


@dataclass(frozen=True)
class Check:
    """One line of the table: something that was measured, or found right or wrong."""

    name: str
    ok: bool  # wrong results, and only those, are False: a missed target is said by `target` and `value`
    value: float | None = None
    unit: str = ""
    target: str = ""  # in words, such as ">= 90 % of the copy ceiling"
    met: bool | None = None  # whether the target was; None without a target, and where nothing was measured
    note: str = ""


def outcome(check: Check) -> str:
    if not check.ok:
        return WRONG
    if check.note.startswith(NOT_RUN):
        return NOT_RUN
    return {None: "ok", True: "met", False: "missed"}[check.met]


def status(checks: Sequence[Check]) -> str:
    """Of a section: "ok", "WRONG" (also if it says nothing at all), or why it was not run."""
    if not checks or not all(check.ok for check in checks):
        return WRONG
    return next((check.note for check in checks if check.note.startswith(NOT_RUN)), "ok")


def table(rows: Sequence[tuple[str, Check]]) -> str:
    """Lines of section, name, value, target, outcome and note, in columns."""
    cells = [("section", "check", "value", "target", "", "")]
    for section, check in rows:
        value = "" if check.value is None else f"{check.value:.4g} {check.unit}".strip()
        cells.append((section, check.name, value, check.target, outcome(check), check.note))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def describe_device(device: torch.device) -> dict[str, str]:
    """Names and versions without which the figures mean nothing."""
    found = {"device": str(device), "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        found["cuda"] = str(torch.version.cuda)
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
