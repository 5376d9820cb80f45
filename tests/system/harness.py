"""Starts real processes for tests, watches them, and proves that nothing of them is left.

Every process that a `Launch` starts, directly or not, inherits a mark in its environment; so strays are found even when
they left the process group or lost their parent.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.system.client import Client

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
STRAYS_TIMEOUT_S = 5.0
POLL_S = 0.05
LONGEST_ROUND_S = 1.0
# Longer than two heartbeats: what a worker reported before the last request ended is not taken for its rest.
SETTLE_S = 0.6
# Less than the death bound of 5 s, after which much is let go of that nobody has freed.
IDLE_WITHIN_S = 4.0
MARK = "PDSERVE_TEST_MARK"
PDSERVE = "from pdserve.gateway.cli import main; main()"
"""What the installed `pdserve` script does; it need not be installed for the tests."""
LAST_WORDS = re.compile(r"^pdserve[ .\w]*: (error|refused): ")

T = TypeVar("T")


def eventually(probe: Callable[[], T | None], timeout_s: float, what: str) -> T:
    """The first truthy value of `probe`. Raises AssertionError, naming `what`, when there is none in time.

    The tests see the system from outside, where there is nothing to wait on; this is the one place that polls. Where
    the machine stands still for seconds, so does what is waited for: that counts as `LONGEST_ROUND_S`.
    """
    waited_s, looked_at = 0.0, time.monotonic()
    while not (value := probe()):
        if waited_s > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what} (last seen: {value!r})")
        time.sleep(POLL_S)
        before, looked_at = looked_at, time.monotonic()
        waited_s += min(looked_at - before, LONGEST_ROUND_S)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Exit:
    code: int
    stderr: str

    @property
    def last_words(self) -> list[str]:
        """Lines in which a program of ours says why it gave up."""
        return [line for line in self.stderr.splitlines() if LAST_WORDS.match(line)]


def _absolute(search_path: str) -> str:
    return os.pathsep.join(str(Path(entry).resolve()) for entry in search_path.split(os.pathsep))


class Launch:
    """One `pdserve` command and everything that it starts; `stop` ends all of it.

    A clean exit of the `with` block asserts exit code 0; an error inside it kills what is left and adds the log to it.
    """

    def __init__(self, *arguments: object, runtime: Path | None = None, prefix: Sequence[str] = ()) -> None:
        """`prefix`: a command that becomes the one behind it, such as `ip netns exec NAME`."""
        self._own_runtime = runtime is None
        # Socket paths may not exceed 107 bytes, so not under pytest's long directories.
        self.runtime = runtime or Path(tempfile.mkdtemp(prefix="pds-", dir="/tmp"))
        self._exit: Exit | None = None
        self._last_log: str | None = None
        self._mark = uuid.uuid4().hex
        self._stdout, self._stderr = (self.runtime / f"{self._mark}.{name}" for name in ("stdout", "stderr"))
        environment = os.environ | {MARK: self._mark, "XDG_RUNTIME_DIR": str(self.runtime), "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # where it is set, every start would compile everything again
        if search_path := environment.get("PYTHONPATH"):
            environment["PYTHONPATH"] = _absolute(search_path)
        self.arguments = list(map(str, arguments))
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._popen = subprocess.Popen(
                [*prefix, sys.executable, "-P", "-c", PDSERVE, *self.arguments],
                cwd=self.runtime,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the command itself, not what it started."""
        self._popen.send_signal(number)

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What was written so far: the logs of the command and of what it started."""
        return self._stderr.read_text(errors="replace") if self._last_log is None else self._last_log

    def log_tail(self, num_lines: int = 150) -> str:
        return "\n".join([f"$ pdserve {' '.join(self.arguments)}", *self.stderr.splitlines()[-num_lines:]])

    def processes(self) -> list[psutil.Process]:
        """The processes of this launch that are alive now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def wait(self, timeout_s: float) -> Exit:
        """Wait for the command to end by itself, and for all that it started to be gone."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            tail = self.log_tail()
            self.kill_all()
            raise AssertionError(f"still running after {timeout_s} s:\n{tail}") from None
        result = Exit(code, self.stderr)
        try:
            eventually(lambda: not self.processes(), STRAYS_TIMEOUT_S, "no process is left behind")
        except AssertionError:
            strays = [" ".join(process.cmdline()) for process in self.processes()]
            self.kill_all()
            raise AssertionError(f"left running: {strays}\n{result.stderr[-4000:]}") from None
        return result

    def kill_all(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._popen.wait(STOP_TIMEOUT_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> Exit:
        """Ask the command to end, wait until it has, remove its runtime directory. A second call changes nothing."""
        if self._exit is None:
            try:
                if self.running:
                    self._popen.send_signal(number)
                self._exit = self.wait(STOP_TIMEOUT_S)
            finally:
                self._remove_runtime()
        return self._exit

    def _remove_runtime(self) -> None:
        self._last_log = self.stderr
        if self._own_runtime:
            shutil.rmtree(self.runtime, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.log_tail())
            self.kill_all()
            self._remove_runtime()
            return
        result = self.stop()
        assert result.code == 0, f"exit code {result.code} after SIGTERM\n{result.stderr[-4000:]}"


class Surface:
    """A running system seen through its gateway's HTTP port."""

    def __init__(self, port: int, model: str) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.client = Client(self.url, model)

    def _status(self, path: str) -> int:
        """Status code of a GET, 0 while nobody listens."""
        try:
            return self.client.get(path).status_code
        except httpx.TransportError:
            return 0

    def wait_linked(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait until so many workers of each kind are registered and every pair is linked."""

        def complete() -> bool:
            if self._status("/ready") != 200:
                return False
            roles = [worker["role"] for worker in self.workers() if worker["state"] != "starting"]
            linked = sum(link["state"] == "linked" for link in self.links())
            return (roles.count("prefill"), roles.count("decode"), linked) == (prefill, decode, prefill * decode)

        eventually(complete, timeout_s, f"{prefill} prefill and {decode} decode workers are linked")

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.client.get("/pools").json()["workers"]
        return workers

    def links(self) -> list[dict[str, Any]]:
        """One entry per (prefill, decode) pair, as the prefill workers report them."""
        return [link for worker in self.workers() if worker["role"] == "prefill" for link in worker["links"]]

    def pids(self, role: str) -> dict[str, int]:
        """Process ids of the registered workers of one role, by name."""
        return {worker["name"]: worker["pid"] for worker in self.workers() if worker["role"] == role}

    def metric(self, sample: str, **labels: str) -> float:
        """Sum over all series of one sample whose labels include `labels`; 0 when there is none."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return sum(
            found.value
            for family in families
            for found in family.samples
            if found.name == sample and labels.items() <= found.labels.items()
        )

    def held_blocks(self) -> float:
        return self.metric("pdserve_kv_blocks", state="held")

    def assert_idle(self, within_s: float = IDLE_WITHIN_S) -> None:
        """Within that time no block is held anywhere and no request is in flight, and it stays so."""

        def idle() -> bool:
            return self.held_blocks() == 0 and self.metric("pdserve_requests_inflight") == 0

        # The series must exist: a sum over nothing would be 0 as well.
        assert "pdserve_kv_blocks{" in self.client.get("/metrics").text
        eventually(idle, within_s, f"no held blocks and nothing in flight ({self.client.get('/pools').text[:2000]})")
        time.sleep(SETTLE_S)
        assert idle(), f"blocks were held again: {self.client.get('/pools').text[:2000]}"


class Gateway(Surface, Launch):
    """A launch that answers HTTP on `port`."""

    def __init__(self, *arguments: object, model: str, port: int, runtime: Path | None = None) -> None:
        Surface.__init__(self, port, model)
        Launch.__init__(self, *arguments, "--port", port, runtime=runtime)

    def _status(self, path: str) -> int:
        """Fails at once when the process has ended."""
        if not self.running:
            raise AssertionError(f"ended early with exit code {self._popen.returncode}\n{self.log_tail()}")
        return super()._status(path)

    def wait_alive(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        eventually(lambda: self._status("/health") == 200, timeout_s, f"{self.url}/health answers")

    def wait_ready(self, prefill: int, decode: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until so many workers of each kind are registered and every pair is linked."""
        self.wait_linked(prefill, decode, timeout_s)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> Exit:
        try:
            return super().stop(number)
        finally:
            self.client.close()  # not earlier: requests under way are part of what is being stopped


class System(Gateway):
    """`pdserve up`: gateway and workers on this machine, ready when the `with` block starts."""

    def __init__(self, model: str | Path, *flags: object, prefill: int = 1, decode: int = 1) -> None:
        pools = ("--prefill", prefill, "--decode", decode)
        super().__init__("up", "--model", model, *pools, *flags, model=Path(model).name, port=free_port())
        self.num_prefill, self.num_decode = prefill, decode

    def __enter__(self) -> Self:
        try:
            self.wait_ready(self.num_prefill, self.num_decode)
        except BaseException as error:
            error.add_note(self.log_tail())
            self.client.close()
            self.kill_all()
            self._remove_runtime()
            raise
        return self
