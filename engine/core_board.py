"""The board by which the workers of one user on one machine tell each other whether their cores are busy. Torch-free.

A small file in shared memory, with 64 bytes for every core:

    byte 0..7    one for each owner of the core (several, with more workers than cores): 0 while it is idle, 1 while it
                 has work, 2 while it has work but would stand aside for a wish, 3 while it does (set in C)
    byte 8..11   the borrower: whose helper is on the core now, 0 for nobody's; set and cleared in C
    byte 12..15  how many wishes have ended: what owners sleep on while they stand aside; in C
    byte 16..23  the wish: who asks for the core though it is busy, and until when; in C

A wish ends when its time is over, on the clock that all processes of a machine share. So one who dies while asking
leaves nothing that anybody would have to wipe out.

An owner holds a lock on its byte while it lives, and the kernel drops that lock with the process, however it ended. So
nobody keeps time or compares process ids: what is not locked belongs to nobody, and whoever notices a dead owner's mark
there wipes it out. A process that is stopped while it is busy keeps its core, and one that is stopped while idle lends
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORE_BYTES = 64
SEATS = 8  # owners of a core
IDLE, BUSY, GIVES_WAY = 0, 1, 2
BORROWER = struct.Struct("=I")
BOARD_CORES = 1024
FLOCK = struct.Struct("@hhqqi4x")  # of Linux on 64 bits: type, whence, start, length, pid

_mapped: list[mmap.mmap] = []  # helper threads may look there at any time: never unmapped


class Unavailable(Exception):
    """Why there can be no board here, in one line."""


def board_path() -> Path:
    """$PDSERVE_CORE_BOARD, or a file of this user in shared memory."""
    own = os.environ.get("PDSERVE_CORE_BOARD")
    return Path(own) if own else Path(f"/dev/shm/pdserve-cores-{os.geteuid()}")


@dataclass(frozen=True)
class Seat:
    """One owner's place at one core."""

    core: int
    number: int

    @property
    def offset(self) -> int:
        return self.core * CORE_BYTES + self.number

    @property
    def name(self) -> int:
        """What its holder is called as a borrower; 0 is nobody."""
        return self.core * SEATS + self.number + 1

    @classmethod
    def named(cls, name: int) -> Seat:
        return cls(*divmod(name - 1, SEATS))


class CoreBoard:
    """The file, seen by one worker."""

    def __init__(self, path: Path) -> None:
        """Open it, made if it is not there. Raises Unavailable."""
        if sys.platform != "linux":
            raise Unavailable("it takes Linux")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.close, self._fd)
            self._map = self._mapping(path)
            on_failure.pop_all()
        _mapped.append(self._map)
        self._names: set[int] = set()  # what this worker is called as a borrower
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _mapping(self, path: Path) -> mmap.mmap:
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise Unavailable(f"{path} must be a file of this user with mode 0600")
            self._is_free(0, 1)  # some sandboxes and file systems have no such locks
            os.posix_fallocate(self._fd, 0, BOARD_CORES * CORE_BYTES)
            return mmap.mmap(self._fd, BOARD_CORES * CORE_BYTES)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from None

    def take_seat(self, core: int) -> Seat | None:
        """Become an owner of this core, busy at first; None if it has too many, or has no place here."""
        for number in range(SEATS if core < BOARD_CORES else 0):
            seat = Seat(core, number)
            if self._lock(seat, fcntl.F_WRLCK):
                self.mark(seat, busy=True)
                self._names.add(seat.name)
                self._forget(seat.name)
                return seat
        return None

    def _forget(self, name: int) -> None:
        """Wipe out where an earlier holder of the seat was the borrower: the name means somebody else now."""
        for core in range(BOARD_CORES):
            if self.borrower(core) == name:
                BORROWER.pack_into(self._map, core * CORE_BYTES + SEATS, 0)

    def mark(self, seat: Seat, *, busy: bool, gives_way: bool = False) -> None:
        """Tell what the seat's holder is doing. `gives_way`: it sees to it that wishes are heard while it is busy."""
        self._map[seat.offset] = (GIVES_WAY if gives_way else BUSY) if busy else IDLE

    def close(self) -> None:
        """Give all seats up. The map stays."""
        for name in self._names:
            self.mark(Seat.named(name), busy=False)
            self._lock(Seat.named(name), fcntl.F_UNLCK)  # the map keeps a descriptor of its own, and so all locks
        os.close(self._fd)

    def busy(self, core: int) -> bool:
        start = core * CORE_BYTES
        return any(self._map[start : start + SEATS])

    def may_be_asked(self, core: int) -> bool:
        """Whether it is busy, but all who are at work there would stand aside."""
        start = core * CORE_BYTES
        marks = self._map[start : start + SEATS]
        return any(marks) and BUSY not in marks

    def borrower(self, core: int) -> int:
        name: int = BORROWER.unpack_from(self._map, core * CORE_BYTES + SEATS)[0]
        return name

    def lender(self, core: int) -> int:
        """The address of a core's state, for `set_helpers`."""
        return self._address + core * CORE_BYTES

    def owned(self, core: int) -> bool:
        """Whether a living process owns the core, which is not our own. What the dead left behind is wiped out."""
        found = [seat for seat in self._marked(core) if not self._wipe(seat)]
        borrower = self.borrower(core)
        if borrower and borrower not in self._names and self._is_free(Seat.named(borrower).offset, 1):
            BORROWER.pack_into(self._map, core * CORE_BYTES + SEATS, 0)
        return bool(found) or not self._is_free(core * CORE_BYTES, SEATS)

    def _marked(self, core: int) -> Iterator[Seat]:
        seats = (Seat(core, number) for number in range(SEATS))
        return (seat for seat in seats if self._map[seat.offset])

    def _wipe(self, seat: Seat) -> bool:
        """Clear the mark of a seat that nobody holds, under its lock: whoever takes it now marks it afterwards."""
        if not self._lock(seat, fcntl.F_WRLCK):
            return False
        self.mark(seat, busy=False)
        self._lock(seat, fcntl.F_UNLCK)
        return True

    def _lock(self, seat: Seat, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, FLOCK.pack(kind, os.SEEK_SET, seat.offset, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _is_free(self, start: int, length: int) -> bool:
        """Whether no other process has locked any of these bytes."""
        wish = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind: int = FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, wish))[0]
        return kind == fcntl.F_UNLCK
