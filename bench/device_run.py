"""Runs the sections of the device check (`device_check.py`) one after the other, and reports."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from .device_report import NOT_RUN, WHOLE, WRONG, Check, Setting, describe_device, outcome, status, table

PACKAGE = __name__.partition(".")[0]  # ours: that must never lack a module
RESULTS = Path(__file__).resolve().parent / "results"
SECTIONS = {  # in this order
    "attention": "pdserve.bench.device_kernels",
    "rows": "pdserve.bench.device_rows",
    "compile": "pdserve.bench.device_compile",
    "decode step": "pdserve.bench.device_step",
    "transfer": "pdserve.bench.device_transfer",
    "pair": "pdserve.bench.device_pair",
}


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    if not args.dry and not torch.cuda.is_available():
        print("no usable CUDA device here; --dry checks on the CPU that this script is whole", file=sys.stderr)
        return 2
    setting = Setting(torch.device("cpu") if args.dry else _numbered(args.device), args.dry)
    if setting.device.type == "cuda":
        torch.cuda.set_device(setting.device)
    started = time.monotonic()
    rows: list[tuple[str, Check]] = []
    for name in args.only or SECTIONS:
        if time.monotonic() - started > args.limit_s:
            rows.append((name, Check(WHOLE, ok=False, note=f"{NOT_RUN}: {args.limit_s:g} s were over")))
            continue
        for check in _run(name, setting):
            rows.append((name, check))
            print(f"{time.monotonic() - started:6.1f} s  {name}: {check.name}: {outcome(check)}", flush=True)
    sections = {name: status([check for of, check in rows if of == name]) for name in args.only or SECTIONS}
    result = {
        "dry": args.dry,
        "seconds": round(time.monotonic() - started, 1),
        "machine": describe_device(setting.device),
        "wrong": sum(not check.ok for _, check in rows),
        "not_run": sum(check.note.startswith(NOT_RUN) for _, check in rows),
        "missed": sum(check.met is False for _, check in rows),
        "sections": sections,
        "checks": [{"section": name, **asdict(check)} for name, check in rows],
    }
    print("\n" + table(rows) + "\n")
    print(json.dumps(result))
    _write(result, args)
    return 1 if WRONG in sections.values() else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and measure what runs on a GPU.")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--only", action="append", choices=tuple(SECTIONS), help="a section (repeatable)")
    parser.add_argument("--limit-s", type=float, default=330.0, help="no section is begun later than this")
    parser.add_argument("--out", type=Path, help="where to write the JSON (default: bench/results/device_<date>.json)")
    return parser.parse_args(argv)


def _numbered(name: str) -> torch.device:
    """As cuda:0 if it has no number: torch takes no other for the current device."""
    device = torch.device(name)
    return torch.device(device.type, device.index or 0)


def _run(name: str, setting: Setting) -> Iterator[Check]:
    """A section's checks; if it breaks off, one more that says so. A dry run may lack packages, a device may not."""
    try:
        yield from importlib.import_module(SECTIONS[name]).run(setting)
    except ModuleNotFoundError as error:
        lacking = (error.name or str(error)).partition(".")[0]
        yield Check(WHOLE, ok=setting.dry and lacking != PACKAGE, note=f"{NOT_RUN}: no {lacking}")
    except Exception as error:
        traceback.print_exc()
        yield Check(WHOLE, ok=False, note=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()


def _write(result: dict[str, object], args: argparse.Namespace) -> None:
    if args.dry and args.out is None:
        return
    path = args.out or RESULTS / f"device_{time.strftime('%Y-%m-%d_%H%M')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)
