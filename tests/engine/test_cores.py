"""Idle cores lent between processes: who owns one, who is on it, and what the dead leave behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pdserve.engine.core_board import BORROWER, CORE_BYTES, SEATS, CoreBoard, Seat, Unavailable
from pdserve.engine.cores import Cores, take_cores
from pdserve.engine.setup import EngineConfig
from pdserve.engine.worker_flags import WorkerConfig
from pdserve.kernels.library import native
from pdserve.kernels.threads import set_helpers
from tests.engine.neighbours import WAIT_S, helped_by, some_work, two_cores, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the board takes Linux")

OWNER = """
import sys
from pathlib import Path
from pdserve.engine.core_board import CoreBoard
board = CoreBoard(Path(sys.argv[1]))
seat = board.take_seat(int(sys.argv[2]))
for line in sys.stdin:
    if line == "idle\\n": board.mark(seat, busy=False)
    if line == "busy\\n": board.mark(seat, busy=True)
    print(seat.number, flush=True)
"""


class Owner:
    """A process that owns a core on the board, and does as it is told."""

    def __init__(self, path: Path, core: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(path), str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.number = int(self.tell("busy"))

    def tell(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSERVE_CORE_BOARD", str(tmp_path / "board"))
    return tmp_path / "board"


@pytest.fixture
def owner(path: Path) -> Iterator[Callable[[int], Owner]]:
    owners: list[Owner] = []

    def start(core: int) -> Owner:
        owners.append(Owner(path, core))
        return owners[-1]

    yield start
    for one in owners:
        one.kill()
    if (library := native()) is not None:
        set_helpers(library, [])


def test_a_core_is_busy_until_all_its_owners_are_idle(path: Path, owner: Callable[[int], Owner]) -> None:
    board = CoreBoard(path)
    assert not board.owned(3)
    first, second = owner(3), owner(3)
    assert (first.number, second.number) == (0, 1)
    assert board.owned(3)
    assert board.busy(3)
    first.tell("idle")
    assert board.busy(3)
    second.tell("idle")
    assert not board.busy(3)
    assert board.owned(3)
    assert not board.owned(2)
    first.tell("busy")
    assert board.busy(3)


def test_what_a_killed_owner_left_is_wiped_out_and_its_place_is_free_again(
    path: Path, owner: Callable[[int], Owner]
) -> None:
    board = CoreBoard(path)
    dying, other = owner(5), owner(5)
    other.tell("idle")
    dying.kill()
    assert board.busy(5)  # until somebody looks
    assert board.owned(5)  # by the other
    assert not board.busy(5)
    assert owner(5).number == dying.number
    assert board.owned(5)
    assert board.busy(5)


def test_a_stopped_owner_keeps_its_core_if_it_was_busy(path: Path, owner: Callable[[int], Owner]) -> None:
    board = CoreBoard(path)
    stopped = owner(1)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    assert board.owned(1)
    assert board.busy(1)
    os.kill(stopped.process.pid, signal.SIGCONT)
    stopped.tell("idle")
    assert not board.busy(1)


def test_a_borrower_that_died_is_forgotten_and_a_living_one_is_not(path: Path, owner: Callable[[int], Owner]) -> None:
    board, borrower = CoreBoard(path), owner(0)
    owner(1).tell("idle")
    with path.open("r+b") as file:
        file.seek(CORE_BYTES + SEATS)
        file.write(BORROWER.pack(Seat(0, borrower.number).name))
    board.owned(1)
    assert board.borrower(1) == Seat(0, borrower.number).name
    borrower.kill()
    board.owned(1)
    assert board.borrower(1) == 0


def test_who_takes_a_seat_is_no_borrower_by_what_its_last_holder_left(
    path: Path, owner: Callable[[int], Owner]
) -> None:
    board, dying = CoreBoard(path), owner(0)
    owner(1).tell("idle")
    with path.open("r+b") as file:
        file.seek(CORE_BYTES + SEATS)
        file.write(BORROWER.pack(Seat(0, dying.number).name))
    dying.kill()
    assert owner(0).number == dying.number
    board.owned(1)
    assert board.borrower(1) == 0


def test_where_there_are_no_locks_of_open_files_nothing_is_lent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(fd: int, command: int, argument: object = 0) -> object:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(fcntl, "fcntl", without)
    take_cores(WorkerConfig("w", (), EngineConfig("m", "m")), {0, 1}).close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_core_has_room_for_so_many_owners(path: Path) -> None:
    board = CoreBoard(path)
    assert [seat.number for _ in range(SEATS) if (seat := CoreBoard(path).take_seat(7))] == list(range(SEATS))
    assert board.take_seat(7) is None
    assert board.take_seat(10_000) is None


def test_a_file_of_others_is_no_board(path: Path, tmp_path: Path) -> None:
    path.touch(mode=0o666)
    path.chmod(0o666)
    with pytest.raises(Unavailable, match="mode 0600"):
        CoreBoard(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unavailable, match="board"):
        CoreBoard(path)


def test_a_neighbours_core_is_used_while_it_is_idle_and_only_then(path: Path, owner: Callable[[int], Owner]) -> None:
    own, other = two_cores()
    alone = some_work()
    board = CoreBoard(path)
    seat = board.take_seat(own)
    cores = Cores(board, seat, [own, other])
    cores.look(0.0)
    assert not helped_by(some_work, 0.2)  # it has no owner: it may not be for us
    neighbour = owner(other)
    cores.look(5.0)
    assert not helped_by(some_work, 0.2)
    neighbour.tell("idle")
    assert helped_by(some_work, WAIT_S)
    assert torch.equal(some_work(), alone)
    seconds, helpers = cores.helped()
    assert seconds > 0
    assert helpers == 1
    neighbour.tell("busy")
    until(lambda: board.borrower(other) == 0, "the helper leaves the core")
    assert not helped_by(some_work, 0.2)
    neighbour.kill()  # while busy
    assert owner(other).tell("idle")
    cores.look(10.0)
    assert helped_by(some_work, WAIT_S)
    cores.close()
    assert not helped_by(some_work, 0.2)


def test_helpers_leave_a_core_by_the_name_they_came_by(path: Path, owner: Callable[[int], Owner]) -> None:
    own, other = two_cores()
    owner(other).tell("idle")
    board = CoreBoard(path)
    cores = Cores(board, board.take_seat(own), [other])
    cores.look(0.0)
    assert helped_by(some_work, WAIT_S)
    library = native()
    assert library is not None
    for name in range(1, 50):
        set_helpers(library, [other], [board.lender(other)], name)
        some_work()
        set_helpers(library, [])  # maybe while one looks out
        until(lambda: board.borrower(other) == 0, "the helper leaves the core")


def test_a_core_has_one_borrower_at_a_time(path: Path, owner: Callable[[int], Owner]) -> None:
    own, other = two_cores()
    board = CoreBoard(path)
    rival, neighbour = owner(own), owner(other)
    neighbour.tell("idle")
    cores = Cores(board, board.take_seat(own), [other])
    with path.open("r+b") as file:
        file.seek(other * CORE_BYTES + SEATS)
        file.write(BORROWER.pack(Seat(own, rival.number).name))
    cores.look(0.0)
    assert not helped_by(some_work, 0.2)
    rival.kill()
    cores.look(5.0)
    assert helped_by(some_work, WAIT_S)


def test_only_a_worker_on_one_core_takes_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**change: object) -> WorkerConfig:
        return WorkerConfig("w", (), EngineConfig("m", "m"), **change)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    take_cores(config(), {0, 1}).close()
    assert not path.exists()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    take_cores(config(lease_cores="never"), {0, 1}).close()
    assert not path.exists()
    cores = take_cores(config(), {0, 1})
    board = CoreBoard(path)
    assert board.owned(0)
    assert board.busy(0)
    cores.idle()
    assert not board.busy(0)
    cores.busy()
    assert board.busy(0)
    cores.close()
    assert not board.owned(0)
    assert not board.busy(0)
