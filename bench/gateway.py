"""`bench gateway`: what the gateway itself costs, with workers behind it that answer from memory (`memory_worker.py`).

A gateway process, the workers' process and this client run on one machine. Two loads, one after the other: all
connections, then a fifth of them. Every connection is one stream that gets a token every `--step-ms`.

    CPU a token   processor time of the gateway's process, all threads, over the tokens that clients got meanwhile
    added         a token's way from the worker's step to the client: sent there, arrived here, on one clock. The tokens
                  of one step are sent together, so the last of them wait for the first ones

Pin the gateway with `--gateway-cpu`, so that client and workers do not run on its core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from ..engine.checkpoint import fingerprint, resolve
from .errors import BenchError
from .machine import describe_machine
from .memory_worker import MODEL, prompt_of
from .options import positive, positive_int
from .stats import percentile

READY_S = 120.0
STOP_S = 20.0
SETTLE_SHARE = 0.2  # of --seconds, after every stream has begun
EVENT, DONE = b"data: {", b"[DONE]"
REPORT_WIDTH = 110


@dataclass(frozen=True)
class LoadResult:
    """One load."""

    connections: int
    tokens_per_s: float
    cpu_us_per_token: float
    cpu_share: float  # of one core
    added_p50_ms: float
    added_p99_ms: float
    broken: int  # streams that did not end as they should


@dataclass
class Stream(asyncio.Protocol):
    """One streamed completion, read as cheaply as can be: when did each event arrive?"""

    number: int
    head: bytes
    body: bytes
    times: list[float] = field(default_factory=list)
    whole: bool = False

    def __post_init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.head + self.body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._tail + data
        self.times += [now] * data.count(EVENT)
        self.whole = self.whole or DONE in data
        self._tail = data[1 - len(EVENT) :]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def open_streams(port: int, numbers: range, max_tokens: int) -> list[Stream]:
    loop = asyncio.get_running_loop()
    streams = []
    for number in numbers:
        body = json.dumps(
            {"model": MODEL, "prompt": prompt_of(number), "max_tokens": max_tokens, "temperature": 0, "stream": True}
            | {"return_token_ids": True}  # an event for every token, also for half a character
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        ).encode()
        _, stream = await loop.create_connection(partial(Stream, number, head, body), "127.0.0.1", port)
        streams.append(stream)
    return streams


class Processes:
    """The gateway and its workers, for one load."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._times_file = directory / "times.json"
        address = f"ipc://{directory}/gw"
        weights = fingerprint(resolve(args.model))
        python = [sys.executable, "-m"]
        gateway = ["pdserve.gateway", "--model", args.model, "--served-model-name", MODEL, "--listen", address]
        workers = ["pdserve.bench.memory_worker", address, weights, str(args.workers), str(args.step_ms / 1000)]
        self._gateway = subprocess.Popen([*python, *gateway, "--port", str(self.port), "--log-level", "warning"])
        self._workers = subprocess.Popen([*python, *workers, str(self._times_file)])
        self.gateway = psutil.Process(self._gateway.pid)
        if args.gateway_cpu is not None:
            self.gateway.cpu_affinity([args.gateway_cpu])

    def cpu_s(self) -> float:
        times = self.gateway.cpu_times()
        return float(times.user + times.system)

    async def ready(self) -> None:
        """Wait until a token comes out. Raises BenchError when none does."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            if self._gateway.poll() is not None or self._workers.poll() is not None:
                raise BenchError("the gateway or its workers ended while they were started")
            try:
                (stream,) = await open_streams(self.port, range(1), 1)
            except OSError:
                await asyncio.sleep(0.2)
                continue
            await stream.ended
            if stream.whole:
                return
            await asyncio.sleep(0.2)
        raise BenchError(f"the gateway did not answer within {READY_S:g} s")

    def stop(self) -> dict[int, list[float]]:
        """End both. When was each token sent, by the number of its request?"""
        for process in (self._gateway, self._workers):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not self._times_file.exists():
            return {}
        return {int(number): times for number, times in json.loads(self._times_file.read_text()).items()}


async def run_load(args: argparse.Namespace, connections: int) -> LoadResult:
    """Open the streams, measure while all of them are running, and let them end."""
    settle_s = SETTLE_SHARE * args.seconds
    num_tokens = round((args.seconds + 3 * settle_s) / (args.step_ms / 1000))
    with tempfile.TemporaryDirectory(prefix="pds-", dir="/tmp") as directory:
        processes = Processes(args, Path(directory))
        try:
            await processes.ready()
            streams = await open_streams(processes.port, range(1, connections + 1), num_tokens)
            await asyncio.sleep(settle_s)
            begun, cpu_s = time.monotonic(), processes.cpu_s()
            await asyncio.sleep(args.seconds)
            ended, cpu_s = time.monotonic(), processes.cpu_s() - cpu_s
            await asyncio.wait([stream.ended for stream in streams], timeout=3 * settle_s + STOP_S)
        finally:
            sent = processes.stop()
    return summarise(streams, sent, begun, ended, cpu_s, num_tokens)


def summarise(
    streams: list[Stream], sent: dict[int, list[float]], begun: float, ended: float, cpu_s: float, num_tokens: int
) -> LoadResult:
    """The figures of the time from `begun` to `ended` (monotonic seconds), of which the gateway computed `cpu_s`."""
    whole = [stream for stream in streams if stream.whole and len(stream.times) == num_tokens]
    arrived = sum(begun <= at < ended for stream in whole for at in stream.times)
    if not arrived:
        raise BenchError("no stream came through whole")
    added = sorted(
        at - left
        for stream in whole
        for at, left in zip(stream.times, sent[stream.number], strict=True)
        if begun <= at < ended
    )
    return LoadResult(
        connections=len(streams),
        tokens_per_s=arrived / (ended - begun),
        cpu_us_per_token=1e6 * cpu_s / arrived,
        cpu_share=cpu_s / (ended - begun),
        added_p50_ms=1000 * percentile(added, 50),
        added_p99_ms=1000 * percentile(added, 99),
        broken=len(streams) - len(whole),
    )


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pdserve bench gateway",
        description="What the gateway costs: CPU a token, and the time it adds, with workers that answer from memory.",
    )
    parser.add_argument("--model", default="demo", help="whose tokenizer the gateway uses (default %(default)s)")
    parser.add_argument("--connections", type=positive_int, default=500, metavar="N", help="default %(default)s")
    parser.add_argument("--workers", type=positive_int, default=16, metavar="N", help="decode workers (%(default)s)")
    parser.add_argument("--step-ms", type=positive, default=100.0, metavar="MS", help="of a worker (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=10.0, metavar="S", help="to measure (%(default)s)")
    parser.add_argument("--gateway-cpu", type=int, metavar="CPU", help="pin the gateway to that core")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    args = parse_options(arguments)
    machine = describe_machine()
    loads = [args.connections, max(args.connections // 5, 1)]
    results = [asyncio.run(run_load(args, connections)) for connections in loads]
    command = shlex.join(["pdserve", "bench", "gateway", *arguments])
    console = Console(width=REPORT_WIDTH)
    console.print(f"{machine.cpu}, {machine.cores} cores, load average {machine.load_average}; {machine.commit}")
    console.print(f"$ {command}", highlight=False)
    table = Table("connections", "tokens/s", "CPU a token, µs", "of one core", "added p50 ms", "p99 ms", "broken")
    for result in results:
        table.add_row(
            str(result.connections), f"{result.tokens_per_s:.0f}", f"{result.cpu_us_per_token:.0f}",
            f"{100 * result.cpu_share:.0f} %", f"{result.added_p50_ms:.2f}", f"{result.added_p99_ms:.2f}",
            str(result.broken),
        )  # fmt: skip
    console.print(table)
    print(json.dumps({"machine": asdict(machine), "command": command, "loads": [asdict(r) for r in results]}))
    return 1 if any(result.broken for result in results) else 0
