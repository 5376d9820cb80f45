"""Servers that a bench starts itself, one after the other, and ends whatever happens to it.

The life of one: started in a session of its own, on the cores that it may use, its output going to a file → ready, when
its mark is in the output and its URL answers → measured → SIGTERM to its group, SIGKILL for what is left of it. Should
this process be killed, Linux sends SIGTERM in its place.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ..engine.config import exit_with_parent
from .errors import BenchError

POLL_S = 0.2  # other people's servers offer nothing to wait on
ANSWER_TIMEOUT_S = 5.0
STOP_GRACE_S = 30.0  # `pdserve up` gives its children twice ten
LAST_LINES = 3
NOT_INHERITED = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Set for this process, perhaps, but no part of how a server is meant to run."""


@dataclass(frozen=True)
class Launch:
    """How to start a server. `ready_mark`: what it prints when it can serve ("": nothing); then `ready_path` answers
    200. In `env` None takes a variable away."""

    command: tuple[str, ...]
    url: str
    ready_path: str
    ready_mark: str = ""
    env: Mapping[str, str | None] = field(default_factory=dict)
    start_timeout_s: float = 600.0


def free_port() -> int:
    """A port of this machine that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@asynccontextmanager
async def running(launch: Launch, cores: Sequence[int]) -> AsyncIterator[asyncio.subprocess.Process]:
    """The server while the block lasts. Raises BenchError, with its last words, when it does not come up."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        log = Path(directory, "output")
        try:
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *launch.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=directory,
                    env=_environment(launch.env),
                    start_new_session=True,
                    preexec_fn=_in_child(os.getpid(), cores),
                )
        except OSError as error:
            raise BenchError(f"cannot start {launch.command[0]}: {error.strerror}") from error
        exited = asyncio.create_task(process.wait())
        try:
            await _until_ready(launch, exited, log)
            yield process
        finally:
            await _end(process, exited)


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    if "PYTHONPATH" in environment:  # the server has another working directory
        parts = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def _in_child(parent: int, cores: Sequence[int]) -> Callable[[], None]:
    def prepare() -> None:
        exit_with_parent(parent)
        os.sched_setaffinity(0, cores)

    return prepare


async def _until_ready(launch: Launch, exited: asyncio.Task[int], log: Path) -> None:
    try:
        async with asyncio.timeout(launch.start_timeout_s), aiohttp.ClientSession() as session:
            while not (_has_mark(log, launch.ready_mark) and await _answers(session, launch.url + launch.ready_path)):
                await asyncio.wait({exited}, timeout=POLL_S)
                if exited.done():
                    raise BenchError(f"it ended with code {exited.result()}: {_last_words(log)}")
    except TimeoutError:
        raise BenchError(f"not ready after {launch.start_timeout_s:.0f} s: {_last_words(log)}") from None


def _has_mark(log: Path, mark: str) -> bool:
    return mark.encode() in log.read_bytes()


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-LAST_LINES:])[-500:] or "it said nothing"


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


async def _end(process: asyncio.subprocess.Process, exited: asyncio.Task[int]) -> None:
    """Nothing of the process's group is left when this returns, even if it is cancelled."""
    try:
        _signal_group(process.pid, signal.SIGTERM)
        await asyncio.wait({exited}, timeout=STOP_GRACE_S)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
    await exited


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it is gone already
        os.killpg(pid, number)
