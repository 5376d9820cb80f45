"""Servers that a bench starts: ready when they answer, and gone afterwards, whatever happened."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from pdserve.bench.errors import BenchError
from pdserve.bench.servers import Launch, free_port, running

CORES = sorted(os.sched_getaffinity(0))
WAIT_S = 10.0
# Serves 200 on every path, after it has started a child that ignores SIGTERM, and says both their process ids.
SERVER = """
import http.server, os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
print("open for business", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def launch(pids: Path, mark: str = "open for business") -> Launch:
    port = free_port()
    command = (sys.executable, "-c", SERVER, str(port), str(pids))
    return Launch(command, f"http://127.0.0.1:{port}", "/health", mark, start_timeout_s=30)


def alive(pids: Path) -> list[int]:
    found = []
    for pid in map(int, pids.read_text().split()):
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            found.append(pid)
    return found


async def until_gone(pids: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        while alive(pids):
            await asyncio.sleep(0.05)


async def test_it_runs_on_its_cores_while_the_block_lasts_and_no_child_is_left(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with running(launch(pids), CORES[:1]) as process:
        assert len(alive(pids)) == 2
        assert psutil.Process(process.pid).cpu_affinity() == CORES[:1]
    await until_gone(pids)


async def test_an_error_in_the_block_ends_it_too(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(ZeroDivisionError):
        async with running(launch(pids), CORES):
            raise ZeroDivisionError
    await until_gone(pids)


async def test_so_does_cancelling_it_before_it_is_ready(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def use() -> None:
        async with running(launch(pids, mark="never said"), CORES):
            pass

    task = asyncio.create_task(use())
    async with asyncio.timeout(WAIT_S):
        while not (pids.exists() and pids.read_text()):
            await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_gone(pids)


async def test_one_that_ends_instead_is_reported_with_its_last_words() -> None:
    command = (sys.executable, "-c", "import sys; print('no such model', file=sys.stderr); sys.exit(3)")
    with pytest.raises(BenchError, match=r"it ended with code 3: no such model"):
        async with running(Launch(command, "http://127.0.0.1:9", "/"), CORES):
            pass


async def test_one_that_never_answers_is_given_up() -> None:
    command = (sys.executable, "-c", "print('thinking', flush=True); import time; time.sleep(600)")
    with pytest.raises(BenchError, match=r"not ready after 1 s: thinking"):
        async with running(Launch(command, f"http://127.0.0.1:{free_port()}", "/", start_timeout_s=1), CORES):
            pass


async def test_a_program_that_does_not_exist_is_named() -> None:
    with pytest.raises(BenchError, match="cannot start /no/such/program"):
        async with running(Launch(("/no/such/program",), "http://127.0.0.1:9", "/"), CORES):
            pass


async def test_it_does_not_inherit_the_threads_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setenv("DROPPED", "yes")
    told = tmp_path / "told"
    code = "import os, sys; open(sys.argv[1], 'w').write(','.join(k for k in os.environ))"
    command = (sys.executable, "-c", code, str(told))
    with pytest.raises(BenchError, match="ended with code 0"):
        async with running(Launch(command, "http://127.0.0.1:9", "/", env={"DROPPED": None, "ADDED": "1"}), CORES):
            pass
    names = told.read_text().split(",")
    assert {"KEPT", "ADDED"} <= set(names)
    assert not {"OMP_NUM_THREADS", "DROPPED"} & set(names)
