"""The system under attack: gateway, prefill and decode workers, each a process that can be killed, frozen and restarted
by name, and a proxy on every link between the pools."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.system.harness import MARK, Surface, eventually, free_port

HERE = Path(__file__).parent
PRELOAD_TIMEOUT_S = 120.0
REPLY_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
STRAYS_TIMEOUT_S = 5.0
TRIM_S = 0.3
LINKS = ("auto", "zmq")  # of the prefill workers, in turn: shared memory, and frames


class Pipe:
    """A program of this folder that takes orders and gives reports as lines of JSON."""

    def __init__(self, script: str, *arguments: str, log: Path, environment: dict[str, str]) -> None:
        with log.open("ab") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(HERE / script), *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._log = log
        self._order_lock = threading.Lock()
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self.on_report = self.reports.put
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.on_report(json.loads(line))

    def order(self, **order: Any) -> None:
        assert self._popen.stdin is not None
        with self._order_lock:
            self._popen.stdin.write(json.dumps(order).encode() + b"\n")
            self._popen.stdin.flush()

    def report(self, timeout_s: float) -> dict[str, Any]:
        try:
            return self.reports.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"no word within {timeout_s} s\n{self._log.read_text()[-4000:]}") from None

    def close(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(REPLY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._reader.join(REPLY_TIMEOUT_S)
        assert self._popen.stdout is not None
        self._popen.stdout.close()


@dataclass
class Member:
    """One process of the system, through all its lives."""

    name: str
    program: str
    argv: list[str]
    pid: int = 0  # 0: not running
    frozen: bool = False
    lives: int = 0
    expected_end: bool = False  # somebody here has killed it or asked it to end


@dataclass(frozen=True)
class Shape:
    """What the system consists of. Flags are those of the launch scripts."""

    model: Path
    name: str
    prefill: int = 2
    decode: int = 2
    death_bound_s: float = 2.0
    check_invariants: bool = True
    gateway_flags: Sequence[object] = ()
    worker_flags: Sequence[object] = ()
    prefill_flags: Sequence[object] = ()
    decode_flags: Sequence[object] = ()


@dataclass(frozen=True)
class Ended:
    """A process that ended though nobody had asked it to."""

    name: str
    code: int
    at: float = field(default_factory=time.monotonic)


class Fleet(Surface):
    """A whole system. Calls may come from several threads; each member is handled by one at a time."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(free_port(), shape.name)
        self.shape = shape
        self.runtime = Path(tempfile.mkdtemp(prefix="pds-", dir="/tmp"))  # socket paths must stay short
        self.ended: list[Ended] = []
        self._mark = uuid.uuid4().hex
        self._codes: dict[int, int] = {}
        self._exit_noted = threading.Condition()
        self._spawn_lock = threading.Lock()
        self._spawned: queue.Queue[int] = queue.Queue()
        self.members = self._plan()
        self._nursery: Pipe | None = None
        self._proxy: Pipe | None = None

    # --- starting and stopping -----------------------------------------------------------------------------------

    def _socket(self, name: str) -> str:
        return f"ipc://{self.runtime}/{name}"

    def _plan(self) -> dict[str, Member]:
        shape, control = self.shape, self._socket("gw")
        common = ["--model", str(shape.model), "--served-model-name", shape.name]
        common += ["--death-bound-s", str(shape.death_bound_s)]
        worker = [*common, "--gateway", control, *map(str, shape.worker_flags)]
        worker += ["--check-invariants"] if shape.check_invariants else []
        gateway = [*common, "--listen", control, "--port", str(self.port), "--shutdown-s", "3"]
        members = [Member("gateway", "gateway", [*gateway, *map(str, shape.gateway_flags)])]
        for number in range(shape.prefill):
            name = f"prefill-{number}"
            link = ["--link", LINKS[number % len(LINKS)]]
            members.append(Member(name, "prefill", [*worker, "--name", name, *link, *map(str, shape.prefill_flags)]))
        for number in range(shape.decode):
            name = f"decode-{number}"
            ends = ["--listen", self._socket(name), "--advertise", self._socket(f"{name}.proxy")]
            members.append(Member(name, "decode", [*worker, "--name", name, *ends, *map(str, shape.decode_flags)]))
        return {member.name: member for member in members}

    def names(self, program: str) -> list[str]:
        return [member.name for member in self.members.values() if member.program == program]

    def _environment(self) -> dict[str, str]:
        environment = os.environ | {MARK: self._mark, "XDG_RUNTIME_DIR": str(self.runtime), "OMP_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        paths = [str(Path(entry).resolve()) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        return environment

    def start(self) -> None:
        environment = self._environment()
        routes = {
            name: {
                kind: [self._socket(f"{name}.proxy.{ending}"), self._socket(f"{name}.{ending}")]
                for kind, ending in (("bulk", "bulk"), ("control", "ctl"))
            }
            for name in self.names("decode")
        }
        log = self.runtime / "harness.log"
        self._proxy = Pipe("proxy.py", json.dumps(routes), log=log, environment=environment)
        self._nursery = Pipe("nursery.py", log=log, environment=environment)
        self._proxy.report(PRELOAD_TIMEOUT_S)
        self._nursery.report(PRELOAD_TIMEOUT_S)
        self._nursery.on_report = self._on_nursery
        for name in self.members:
            self.spawn(name)
        self.wait_linked(self.shape.prefill, self.shape.decode, READY_TIMEOUT_S)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException as error:
            error.add_note(self.log_tail())
            self.destroy()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.log_tail())
            self.destroy()
            return
        try:
            codes = self.stop()
            problem = f"exit codes {codes}, ended by themselves: {self.ended}\n{self.log_tail()}"
            assert not any(codes.values()), problem
            assert not self.ended, problem
        finally:
            self.destroy()

    def stop(self) -> dict[str, int]:
        """SIGTERM to everything, gateway first; exit codes by name. AssertionError when something does not end."""
        codes = {}
        for name, member in self.members.items():
            if member.pid:
                self.thaw(name)
                member.expected_end = True
                codes[name] = self._end(member, signal.SIGTERM)
        return codes

    def destroy(self) -> None:
        """Kill whatever is left and remove the files."""
        self.client.close()
        for pipe in (self._nursery, self._proxy):
            if pipe is not None:
                pipe.close()
        for process in self._strays():
            process.kill()
        eventually(lambda: not self._strays(), STRAYS_TIMEOUT_S, "no process is left behind")
        shutil.rmtree(self.runtime, ignore_errors=True)

    def _strays(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    # --- processes -----------------------------------------------------------------------------------------------

    def _on_nursery(self, report: dict[str, Any]) -> None:
        if "exited" not in report:
            self._spawned.put(report["pid"])
            return
        with self._exit_noted:
            pid = report["exited"]
            self._codes[pid] = report["code"]
            for member in self.members.values():
                if member.pid == pid:
                    member.pid, member.frozen = 0, False
                    if not member.expected_end:
                        self.ended.append(Ended(member.name, report["code"]))
            self._exit_noted.notify_all()

    def log_file(self, name: str) -> Path:
        return self.runtime / f"{name}.log"

    def spawn(self, name: str) -> None:
        """Start a member that is not running."""
        member = self.members[name]
        assert self._nursery is not None
        assert member.pid == 0, f"{name} is running"
        environment = {"XDG_RUNTIME_DIR": str(self.runtime)}
        log = str(self.log_file(name))
        with self._spawn_lock:
            self._nursery.order(program=member.program, argv=member.argv, env=environment, log=log)
            pid = self._spawned.get(timeout=REPLY_TIMEOUT_S)
        with self._exit_noted:
            member.expected_end = False
            member.lives += 1
            if pid not in self._codes:
                member.pid = pid

    def _end(self, member: Member, number: signal.Signals) -> int:
        pid = member.pid
        with self._exit_noted:
            member.expected_end = True
            if pid == 0:
                return 0
            os.kill(pid, number)
            assert self._exit_noted.wait_for(lambda: pid in self._codes, STOP_TIMEOUT_S), f"{member.name} does not end"
            return self._codes[pid]

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(self.members[name], signal.SIGKILL)

    def freeze(self, name: str) -> None:
        member = self.members[name]
        if member.pid:
            member.frozen = True
            os.kill(member.pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        member = self.members[name]
        if member.pid:
            os.kill(member.pid, signal.SIGCONT)
            member.frozen = False

    def kept_bytes(self) -> dict[str, int]:
        """Anonymous resident bytes of every member in its first life, after it has given back what is free.

        (Pages of files come and go with what is executed first, and a heap keeps its highest water.)
        """
        first = {name: m for name, m in self.members.items() if m.lives == 1 and m.pid and not m.frozen}
        for member in first.values():
            with suppress(ProcessLookupError):  # killed in this moment
                os.kill(member.pid, signal.SIGUSR2)
        time.sleep(TRIM_S)
        sizes = {}
        for name, member in first.items():
            try:
                status = Path(f"/proc/{member.pid}/status").read_text()
            except OSError:
                continue
            if found := re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE):  # a process that is dying has none
                sizes[name] = int(found[1]) * 1024
        return sizes

    def open_files(self) -> dict[str, int]:
        """How many descriptors every member in its first life has."""
        counts = {}
        for name, member in self.members.items():
            if member.lives == 1 and member.pid:
                with suppress(psutil.NoSuchProcess):
                    counts[name] = psutil.Process(member.pid).num_fds()
        return counts

    # --- what can be seen ----------------------------------------------------------------------------------------

    def inflight(self) -> dict[str, int]:
        """Attempts that the gateway has placed on each registered worker."""
        return {worker["name"]: worker["load"]["inflight"] for worker in self.workers()}

    @property
    def proxy(self) -> Pipe:
        assert self._proxy is not None
        return self._proxy

    def log_tail(self, num_lines: int = 40) -> str:
        tails = []
        for path in sorted(self.runtime.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-num_lines:]
            tails.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(tails)

    def log_lines(self, name: str, containing: str) -> list[str]:
        return [line for line in self.log_file(name).read_text(errors="replace").splitlines() if containing in line]
