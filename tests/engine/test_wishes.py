"""Busy cores that are asked for: who stands aside, for whom, and until when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pdserve.engine.core_board import CORE_BYTES, GIVES_WAY, SEATS, CoreBoard, Seat
from pdserve.engine.cores import Cores
from pdserve.kernels.library import native
from pdserve.kernels.threads import ask, ask_no_more, set_helpers
from tests.engine.neighbours import WAIT_S, helped_by, some_work, two_cores, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the board takes Linux")

ASIDE = 3
WISH_AT = SEATS + 8
WISH_NAME_BITS = 16
AT_WORK = """
import os, sys, threading, time
from pathlib import Path
from pdserve.engine.core_board import CoreBoard
from pdserve.engine.cores import Cores
from tests.engine.neighbours import some_work, torch
board, core = CoreBoard(Path(sys.argv[1])), int(sys.argv[2])
os.sched_setaffinity(0, {core})
torch.set_num_threads(1)
expected, done, wrong, began = some_work(), 0, 0, time.monotonic()
cores = Cores(board, board.take_seat(core), [], gives_way=sys.argv[3] == "gives way")
def answer():
    for line in sys.stdin:
        print(done, wrong, cores.aside_s(), time.monotonic() - began, flush=True)
threading.Thread(target=answer, daemon=True).start()
while True:
    wrong += not torch.equal(some_work(), expected)
    done += 1
"""
ASKS = """
import sys
from pathlib import Path
from pdserve.engine.core_board import CoreBoard
from pdserve.kernels.library import native
from pdserve.kernels.threads import ask
board = CoreBoard(Path(sys.argv[1]))
seat, library = board.take_seat(int(sys.argv[2])), native()
print(seat.name, flush=True)
while True:
    ask(library, board.lender(int(sys.argv[3])), seat.name, 0.1)
"""


class Report(NamedTuple):
    done: int
    wrong: int
    aside_s: float
    lived_s: float


class Process:
    """One of those two scripts."""

    def __init__(self, script: str, *arguments: object) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, "it has ended"
        return line

    def report(self) -> Report:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()
        done, wrong, aside_s, lived_s = self.line().split()
        return Report(int(done), int(wrong), float(aside_s), float(lived_s))

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate(timeout=WAIT_S)


class Site:
    """A board, this process with a seat at one core, and whoever works on, or asks for, the other."""

    def __init__(self, path: Path) -> None:
        library = native()
        self.own, self.other = two_cores()
        assert library is not None
        self.library, self.path, self.board = library, path, CoreBoard(path)
        self.processes: list[Process] = []
        seat = self.board.take_seat(self.own)
        assert seat is not None
        self.seat = seat
        self.cores = Cores(self.board, self.seat, [self.other])

    def worker(self, how: str = "gives way") -> Process:
        """A neighbour that computes all the time."""
        self.processes.append(Process(AT_WORK, self.path, self.other, how))
        until(lambda: self.processes[-1].report().done > 0, "it computes")
        self.cores.look(0.0)
        return self.processes[-1]

    def asker(self) -> tuple[Process, int]:
        """Somebody else who asks for the other core all the time, and its name."""
        self.processes.append(Process(ASKS, self.path, self.own, self.other))
        return self.processes[-1], int(self.processes[-1].line())

    def marks(self) -> bytes:
        start = self.other * CORE_BYTES
        return self.path.read_bytes()[start : start + SEATS]

    def wish(self) -> int:
        start = self.other * CORE_BYTES + WISH_AT
        return int.from_bytes(self.path.read_bytes()[start : start + 8], sys.byteorder)

    def is_aside(self) -> bool:
        return ASIDE in self.marks()

    def until_aside(self) -> None:
        """Ask until the neighbour stands aside, which on a full machine may be too late for one wish."""
        deadline = time.monotonic() + WAIT_S
        while not self.is_aside():
            assert time.monotonic() < deadline, "it does not stand aside"
            self.cores.ask_no_more()
            self.cores.ask()
            pause = time.monotonic() + 0.02
            while not self.is_aside() and time.monotonic() < pause:
                time.sleep(0.0005)

    def goes_on(self, worker: Process) -> None:
        before = worker.report().done
        until(lambda: worker.report().done > before, "the neighbour goes on")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self.cores.close()
        set_helpers(self.library, [])


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "board")
    yield site
    site.close()


def asked(site: Site, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    site.cores.ask()
    try:
        return work()
    finally:
        site.cores.ask_no_more()


def test_a_busy_core_is_used_while_it_is_asked_for_and_only_then(site: Site) -> None:
    alone = some_work()
    worker = site.worker()
    assert not helped_by(some_work, 0.2)
    assert helped_by(lambda: asked(site, some_work), WAIT_S)
    for _ in range(100):
        assert torch.equal(asked(site, some_work), alone)
    until(lambda: site.board.borrower(site.other) == 0, "the helper leaves the core")
    assert not helped_by(some_work, 0.2)
    site.goes_on(worker)
    assert worker.report().wrong == 0
    assert worker.report().aside_s > 0


def test_who_stands_aside_computes_nothing(site: Site) -> None:
    worker = site.worker()

    def same_while_aside() -> bool:
        site.until_aside()
        first, second = worker.report().done, worker.report().done
        if not site.is_aside():
            return False  # the wish was over before the second answer
        assert first == second
        return True

    until(same_while_aside, "two answers within one wish")
    site.cores.ask_no_more()
    site.goes_on(worker)
    assert site.marks()[0] == GIVES_WAY


def test_a_wish_that_is_not_ended_ends_by_itself(site: Site) -> None:
    worker = site.worker()
    site.until_aside()
    until(lambda: not site.is_aside(), "the neighbour stands aside no more")
    site.goes_on(worker)
    until(lambda: site.wish() == 0, "nothing is left of the wish")
    site.cores.ask_no_more()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_asker_that_is_killed_or_stopped_holds_nobody_up(site: Site, how: signal.Signals) -> None:
    worker = site.worker()
    asker, _ = site.asker()
    until(site.is_aside, "the neighbour stands aside")
    os.kill(asker.popen.pid, how)
    site.goes_on(worker)
    until(lambda: site.wish() == 0 and not site.is_aside(), "nothing is left of the wish")
    assert helped_by(lambda: asked(site, some_work), WAIT_S)


def test_a_worker_killed_while_it_stands_aside_is_succeeded_by_the_next(site: Site) -> None:
    site.worker()
    site.until_aside()
    site.processes[-1].kill()
    site.cores.ask_no_more()
    site.cores.look(5.0)
    assert not site.board.owned(site.other)
    assert not any(site.marks())
    site.worker()
    site.cores.look(10.0)
    assert helped_by(lambda: asked(site, some_work), WAIT_S)


def test_only_who_asked_gets_the_core(site: Site) -> None:
    site.worker()
    _, name = site.asker()
    until(site.is_aside, "the neighbour stands aside")
    assert not helped_by(some_work, 0.2)
    lender = site.board.lender(site.other)
    until(lambda: not ask(site.library, lender, site.seat.name, 0.1), "there is another's wish")
    ask_no_more(site.library, lender, site.seat.name)
    until(lambda: site.wish() % (1 << WISH_NAME_BITS) == name, "the wish is the other's still")


@pytest.mark.parametrize("how", ["keeps it", "gives way, beside one who keeps it"])
def test_who_does_not_give_way_cannot_be_asked(site: Site, how: str) -> None:
    worker = site.worker(how)
    if "beside" in how:
        site.worker("gives way")
    assert site.board.owned(site.other)
    assert not site.cores.ask()
    ask(site.library, site.board.lender(site.other), site.seat.name, 0.1)
    assert not helped_by(some_work, 0.05)
    site.goes_on(worker)
    assert worker.report().aside_s == 0


def test_an_idle_core_need_not_be_asked_for(site: Site) -> None:
    site.worker()
    assert site.board.may_be_asked(site.other)
    site.board.mark(Seat(site.other, 0), busy=False)
    assert not site.board.may_be_asked(site.other)
    assert not site.cores.ask()


def test_a_wish_for_longer_than_any_may_last_is_none(site: Site) -> None:
    worker = site.worker()
    until_us = int((time.monotonic() + 3600) * 1e6)
    with site.path.open("r+b") as file:
        file.seek(site.other * CORE_BYTES + WISH_AT)
        file.write((until_us << WISH_NAME_BITS | site.seat.name).to_bytes(8, sys.byteorder))
    until(lambda: site.wish() == 0, "it is wiped out")
    site.goes_on(worker)
    assert worker.report().aside_s == 0


def test_however_many_ask_a_part_of_the_time_is_left_to_the_owner(site: Site) -> None:
    worker = site.worker()
    for _ in range(2):
        site.asker()
    before = worker.report()

    def has_worked() -> bool:
        """For much longer than it stands aside at a stretch: on a full machine it may be late to wake from one."""
        now = worker.report()
        lived_s = now.lived_s - before.lived_s
        return lived_s > 3.0 and 0 < now.aside_s - before.aside_s < 0.9 * lived_s

    until(has_worked, "it has stood aside for a part of the time only")
    after = worker.report()
    assert after.done > before.done
    assert after.wrong == 0
