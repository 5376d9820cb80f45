"""`bench steady`: many short requests, and whether a server is at the end what it was near the beginning.

A closed loop of clients sends them all; the run is cut into windows of `--window` requests. The first window warms the
server up and does not count: the second and the last are compared, in time a token, in processor time a request and in
memory. The last two are what the server's processes on this machine use (pids from /pools, and whoever listens on the
port); for a server that is elsewhere, or not ours, only times are compared. Other work on the machine changes times by
half and more; processor time tells whether the server does more than before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
from dataclasses import asdict, dataclass
from itertools import islice
from urllib.parse import urlsplit

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from .client import Client, find_model, open_session
from .errors import BenchError
from .load import Run
from .machine import describe_machine
from .options import fresh_seed, http_url, positive_int
from .prompts import DEFAULT_FIRST_ID, DEFAULT_LAST_ID, PromptMaker, id_pieces
from .workload import synthetic

TIMEOUT_S = 600.0
REPORT_WIDTH = 110


@dataclass(frozen=True)
class Window:
    """One part of the run."""

    requests: int  # sent so far, this window included
    failed: int
    requests_per_s: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    rss_mib: dict[str, float]  # by process
    cpu_ms: dict[str, float]  # by process, of a request


async def server_processes(session: aiohttp.ClientSession, url: str) -> dict[str, psutil.Process]:
    """The server's processes on this machine, by name; none where it does not say, or is somewhere else."""
    found: dict[str, psutil.Process] = {}
    port = urlsplit(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
            found["gateway"] = psutil.Process(connection.pid)
    if not found:
        return {}
    async with session.get(f"{url}/pools") as response:
        if response.status == 200:
            for worker in (await response.json(content_type=None)).get("workers", []):
                if psutil.pid_exists(worker["pid"]):
                    found[worker["name"]] = psutil.Process(worker["pid"])
    return found


async def measure(args: argparse.Namespace) -> list[Window]:
    console = Console(stderr=True, highlight=False)
    maker = PromptMaker(id_pieces(DEFAULT_FIRST_ID, DEFAULT_LAST_ID), args.seed)
    windows: list[Window] = []
    async with open_session(TIMEOUT_S) as session:
        model = await find_model(session, args.url, args.model)
        processes = await server_processes(session, args.url)
        plan = synthetic(
            maker, "steady", input_tokens=args.input_tokens, output_tokens=args.output_tokens, prefix_tokens=0,
            times=None,
        )  # fmt: skip
        sent = 0
        while sent < args.num_requests:
            count = min(args.window, args.num_requests - sent)
            run, before_s = Run(Client(session, args.url, model.name)), _cpu_seconds(processes)
            await run.closed_loop(islice(plan, count), concurrency=args.concurrency)
            sent += count
            windows.append(_window(run, sent, processes, before_s))
            console.print(f"{sent} requests, {windows[-1].tpot_p50_ms:.2f} ms a token")
    return windows


def _cpu_seconds(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def _window(
    run: Run, sent: int, processes: dict[str, psutil.Process], before_s: dict[str, float]
) -> Window:
    """Raises BenchError when nothing of it succeeded."""
    good = [record for record in run.records if record.ok and record.tpot_s is not None and record.ttft_s is not None]
    if not good:
        raise BenchError(f"no request of a whole window succeeded: {run.records[0].error}: {run.records[0].detail}")
    took_s = max(record.ended_s for record in run.records) - run.started_s
    return Window(
        requests=sent,
        failed=len(run.records) - len(good),
        requests_per_s=len(good) / took_s,
        ttft_p50_ms=1000 * statistics.median(record.ttft_s or 0.0 for record in good),
        tpot_p50_ms=1000 * statistics.median(record.tpot_s or 0.0 for record in good),
        rss_mib={name: process.memory_info().rss / 2**20 for name, process in processes.items()},
        cpu_ms={
            name: 1000 * (after_s - before_s[name]) / len(good) for name, after_s in _cpu_seconds(processes).items()
        },
    )


def compare(windows: list[Window]) -> dict[str, float]:
    """The last window over the second: ratios of times, and differences of memory in MiB."""
    first, last = windows[min(1, len(windows) - 1)], windows[-1]
    ratios = {
        "tpot_ratio": _ratio(last.tpot_p50_ms, first.tpot_p50_ms),
        "ttft_ratio": _ratio(last.ttft_p50_ms, first.ttft_p50_ms),
        "cpu_ratio": _ratio(sum(last.cpu_ms.values()), sum(first.cpu_ms.values())),
    }
    return ratios | {f"{name}_grown_mib": last.rss_mib[name] - size for name, size in first.rss_mib.items()}


def _ratio(last_ms: float, first_ms: float) -> float:
    return last_ms / first_ms if first_ms else 1.0  # a server may send all tokens at once


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pdserve bench steady", description="Many short requests: is the last one served as the first ones were?"
    )
    parser.add_argument("--url", required=True, type=http_url, help="base URL, such as http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="default: the first one in /v1/models")
    parser.add_argument("--num-requests", type=positive_int, default=10_000, metavar="N", help="default %(default)s")
    parser.add_argument("--window", type=positive_int, default=500, metavar="N", help="default %(default)s")
    parser.add_argument("--concurrency", type=positive_int, default=16, metavar="N", help="default %(default)s")
    parser.add_argument("--input-tokens", type=positive_int, default=8, metavar="N", help="default %(default)s")
    parser.add_argument("--output-tokens", type=positive_int, default=4, metavar="N", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="default: another one every time")
    args = parser.parse_args(arguments)
    if args.output_tokens < 2:
        parser.error("--output-tokens must be at least 2: one token alone has no time a token")
    args.seed = fresh_seed() if args.seed is None else args.seed
    return args


def main(arguments: list[str]) -> int:
    args = parse_options(arguments)
    machine = describe_machine()
    windows = asyncio.run(measure(args))
    command = shlex.join(["pdserve", "bench", "steady", *arguments])
    console = Console(width=REPORT_WIDTH)
    console.print(f"{machine.cpu}, {machine.cores} cores, load average {machine.load_average}; {machine.commit}")
    console.print(f"$ {command}", highlight=False)
    names = list(windows[0].rss_mib)
    headings = "requests", "failed", "requests/s", "TTFT p50 ms", "TPOT p50 ms", "CPU ms a request"
    table = Table(*headings, *(f"{name} MiB" for name in names))
    for window in windows:
        table.add_row(
            str(window.requests), str(window.failed), f"{window.requests_per_s:.1f}", f"{window.ttft_p50_ms:.1f}",
            f"{window.tpot_p50_ms:.2f}", f"{sum(window.cpu_ms.values()):.2f}",
            *(f"{window.rss_mib[name]:.1f}" for name in names),
        )  # fmt: skip
    console.print(table)
    verdict = compare(windows)
    parts = [f"{name.removesuffix('_grown_mib')} {value:+.1f} MiB" for name, value in verdict.items() if "mib" in name]
    console.print(
        f"last window against the second: TPOT {verdict['tpot_ratio']:.2f} x, TTFT {verdict['ttft_ratio']:.2f} x, "
        f"CPU time {verdict['cpu_ratio']:.2f} x; "
        + ", ".join(parts)
    )
    result = {"machine": asdict(machine), "command": command, "seed": args.seed, **verdict}
    print(json.dumps(result | {"windows": [asdict(window) for window in windows]}))
    return 1 if any(window.failed for window in windows) else 0
