"""Keeps a fixed set of child processes alive, and leaves none behind. Knows nothing of what they do.

The life of a child: it is spawned in a process group of its own, its output is passed on line by line under its name,
and when it dies it is spawned again after a pause that doubles with every short life. One that exits with code 0 was
told to (it was drained, or got a signal of its own): it stays away. Three things end the whole set: `request_stop` (a
signal), a child that cannot work as configured before the set was ever ready, and the end of the last child.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..engine.config import EXIT_CONFIG, EXIT_REFUSED
from ..transfer.errors import ConfigError, RegistrationRefused

LINE_LIMIT_BYTES = 1024 * 1024
OUTPUT_DRAIN_S = 1.0
LAST_WORDS = re.compile(r"^pdserve[.\w]*: (?:error|refused): (?P<reason>.*)$")
"""The one line with which a child says why it cannot work (see `run_main`)."""

logger = logging.getLogger("pdserve.up")


@dataclass(frozen=True)
class ChildSpec:
    """What to run. `name` marks the child's output."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # on top of this process's environment
    stops_first: bool = False  # the others go on until it has ended, since it needs them to finish its work


@dataclass(frozen=True)
class Backoff:
    """The pause before a child is started again: doubled by every short life, reset by a long one."""

    first_s: float = 1.0
    longest_s: float = 30.0
    reset_after_s: float = 60.0

    def next_pause_s(self, pause_s: float, lived_s: float) -> float:
        """The pause after a life of `lived_s`, the one before it being `pause_s` (0 before the first)."""
        if pause_s == 0 or lived_s >= self.reset_after_s:
            return self.first_s
        return min(pause_s * 2, self.longest_s)


def write_text(name: str, line: str) -> None:
    """Pass a child's line on, marked with its name."""
    print(f"[{name}] {line}", file=sys.stderr, flush=True)


def write_json(name: str, line: str) -> None:
    """The same where every line must stay one JSON object: the name becomes the key `process`."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    entry = {"process": name, **(entry if isinstance(entry, dict) else {"message": line})}
    print(json.dumps(entry), file=sys.stderr, flush=True)


@dataclass
class _Life:
    """One life of one child."""

    process: asyncio.subprocess.Process
    last_words: str = ""


class Supervisor:
    """Runs every child of `specs` until told to stop. Must be used on the main thread.

    (Linux delivers the parent-death signal when the *thread* that spawned the child ends.)
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        backoff: Backoff | None = None,
        write: Callable[[str, str], None] = write_text,
        stop_grace_s: float = 10.0,
    ) -> None:
        self._specs = tuple(specs)
        self._backoff = backoff or Backoff()
        self._write = write
        self._stop_grace_s = stop_grace_s
        self._lives: dict[str, _Life] = {}
        self._stopping = asyncio.Event()
        self._ready = False

    @property
    def pids(self) -> dict[str, int]:
        """The process id of every child that is alive now."""
        return {name: life.process.pid for name, life in self._lives.items()}

    def request_stop(self) -> None:
        """Stop every child and let `run` return; asked a second time, do not wait for them."""
        if self._stopping.is_set():
            self._signal_all(signal.SIGKILL)
        else:
            logger.info("stopping (the same signal again kills at once)")
        self._stopping.set()

    async def pause(self, seconds: float) -> bool:
        """Wait that long, or until a stop is asked for: then False."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return not self._stopping.is_set()

    async def run(self, until_ready: Callable[[], Awaitable[None]], on_ready: Callable[[], None]) -> None:
        """Start the children, call `on_ready` once `until_ready` has returned, keep them alive until `request_stop`.

        When it returns or raises, no child is left.
        Raises ConfigError or RegistrationRefused with a child's own words when that child exited with the matching
        code before the set was ever ready, and whatever `until_ready` raises.
        """
        keepers = [asyncio.create_task(self._keep(spec), name=spec.name) for spec in self._specs]
        stop = asyncio.create_task(self._stopping.wait())
        ready = asyncio.ensure_future(until_ready())
        watched: set[asyncio.Future[Any]] = {*keepers, stop, ready}
        try:
            while not self._stopping.is_set() and not all(keeper.done() for keeper in keepers):
                done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if ready in done and not self._stopping.is_set():
                    self._ready = True
                    on_ready()
        finally:
            stop.cancel()
            ready.cancel()
            await self._stop_children(keepers)

    async def _stop_children(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        self._stopping.set()
        first = [keeper for spec, keeper in zip(self._specs, keepers, strict=True) if spec.stops_first]
        if first:
            self._signal_all(signal.SIGTERM, [spec.name for spec in self._specs if spec.stops_first])
            await asyncio.wait(first, timeout=self._stop_grace_s)
        self._signal_all(signal.SIGTERM)
        _, alive = await asyncio.wait(keepers, timeout=self._stop_grace_s)
        if alive:
            names = ", ".join(sorted(self._lives))
            logger.warning("killing what did not stop within %.0f s: %s", self._stop_grace_s, names)
            self._signal_all(signal.SIGKILL)
            await asyncio.wait(keepers)

    def _signal_all(self, number: signal.Signals, names: Sequence[str] | None = None) -> None:
        for name, life in self._lives.items():
            if names is None or name in names:
                with suppress(ProcessLookupError):  # it has just exited by itself
                    os.killpg(life.process.pid, number)

    async def _keep(self, spec: ChildSpec) -> None:
        """Run one child again and again, until it leaves by itself. Raises when it cannot work as configured."""
        clock = asyncio.get_running_loop().time
        pause_s = 0.0
        while not self._stopping.is_set():
            started = clock()
            code, last_words = await self._live(spec)
            if self._stopping.is_set():
                return
            if code == 0:
                logger.info("%s has left, as it was told to: it is not started again", spec.name)
                return
            if not self._ready:
                _raise_if_misconfigured(spec.name, code, last_words)
            pause_s = self._backoff.next_pause_s(pause_s, clock() - started)
            if last_words:
                self._write(spec.name, last_words)
            logger.warning("%s %s, starting it again in %g s", spec.name, _describe_exit(code), pause_s)
            await self.pause(pause_s)

    async def _live(self, spec: ChildSpec) -> tuple[int, str]:
        """One life: spawn, pass its output on, wait for its end. Returns its exit code and its last words."""
        # The pipe is ours and not asyncio's: its Process.wait() would wait until every holder has closed it,
        # so a helper process that outlives a crashed worker would hide the crash.
        read_fd, write_fd = os.pipe()
        reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                env={**os.environ, **spec.env},
                start_new_session=True,  # Ctrl-C reaches this process only, which then stops the children
            )
        finally:
            os.close(write_fd)
        life = self._lives[spec.name] = _Life(process)
        output = asyncio.create_task(self._pass_output_on(spec.name, life, reader))
        try:
            if self._stopping.is_set():  # asked while it was being spawned: this one had no SIGTERM yet
                process.terminate()
            code = await process.wait()
        finally:
            del self._lives[spec.name]
        with suppress(ProcessLookupError):  # the rule: nothing of its process group is left
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait([output], timeout=OUTPUT_DRAIN_S)
        output.cancel()
        transport.close()
        return code, life.last_words

    async def _pass_output_on(self, name: str, life: _Life, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await reader.readline()
            except ValueError:  # asyncio has thrown away a line longer than its limit
                self._write(name, f"(a line of more than {LINE_LIMIT_BYTES} bytes is left out)")
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            if LAST_WORDS.match(line):
                life.last_words = line  # shown once, when it is known what they mean
            elif line:
                self._write(name, line)


def _raise_if_misconfigured(name: str, code: int, last_words: str) -> None:
    match = LAST_WORDS.match(last_words)
    reason = f"{name}: {match['reason'] if match else _describe_exit(code)}"
    if code == EXIT_CONFIG:
        raise ConfigError(reason)
    if code == EXIT_REFUSED:
        raise RegistrationRefused(reason)


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
