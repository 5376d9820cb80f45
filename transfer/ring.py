"""A ring of bytes in shared memory: one process writes, one other on the same machine reads.

The memory is a memfd: it has no name that could be left behind, and is gone with the last of the two processes. Its
size is sealed, so neither end can be shot down by the other's truncating it, and the reader maps it privately, so
whatever it does never reaches the writer. The reader finds it under `/proc/PID/fd/FD`, and knows by a secret at its
beginning that it is the one that was meant (process numbers mean nothing in another container).

Positions only ever grow; a position's place in memory is its remainder. The writer reuses what is before the position
that the reader has acknowledged. Both ends live as long as their link does, and a ring is never lent to another pair.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
from bisect import bisect_left, insort
from collections import deque

from .errors import RingUnavailable
from .offers import RingOffer

HEADER_BYTES = 4096
ALIGNMENT_BYTES = 64
DEFAULT_RING_BYTES = 64 * 1024 * 1024
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def whole_units(size_bytes: int) -> int:
    """The size of a ring in that much memory."""
    return size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class RingSpace:
    """Which places of a ring are in use: the writer's account.

    A piece goes to the first place that is free, so what is written is, as a rule, what was read a moment ago and is
    still in a cache.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.head = 0  # behind the last position that was given out
        self._ends: deque[int] = deque()  # the position behind each, the oldest first
        self._in_use: list[tuple[int, int]] = []  # (place, the place behind it) of each, by place

    def allocate(self, num_bytes: int) -> int | None:
        """The next position with that much memory in one piece; None while there is no room."""
        size = max(_aligned(num_bytes), ALIGNMENT_BYTES)  # a piece without bytes has a place of its own, too
        place = 0
        for start, end in self._in_use:
            if place + size <= start:
                break
            place = end
        if place + size > self.size_bytes:
            return None
        position = self.head + (place - self.head) % self.size_bytes
        self.head = position + size
        self._ends.append(self.head)
        insort(self._in_use, (place, place + size))
        return position

    def free_up_to(self, position: int) -> None:
        """The reader is done with everything before `position`; a position never written to is not believed."""
        position = _aligned(position)
        while position <= self.head and self._ends and self._ends[0] <= position:
            last = (self._ends.popleft() - 1) % self.size_bytes  # the byte
            del self._in_use[bisect_left(self._in_use, (last + 1, 0)) - 1]


class RingWriter:
    """The end that owns the memory. Raises RingUnavailable when this machine does not give it."""

    def __init__(self, size_bytes: int) -> None:
        size = whole_units(size_bytes)
        secret = secrets.token_bytes(16)
        try:
            self._fd = os.memfd_create("pdserve-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise RingUnavailable(f"no shared memory: {error.strerror}") from None
        try:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + size)  # now, since later it would be a signal
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self._fd, HEADER_BYTES + size)
        except OSError as error:
            os.close(self._fd)
            raise RingUnavailable(f"no shared memory of {size_bytes} bytes: {error.strerror}") from None
        self._map[: len(secret)] = secret
        self._view = memoryview(self._map)
        self._space = RingSpace(size)
        self.offer = RingOffer(os.getpid(), self._fd, size, secret.hex())

    @property
    def head(self) -> int:
        return self._space.head

    def allocate(self, num_bytes: int) -> tuple[int, memoryview] | None:
        """A position, see `RingSpace`, and its memory."""
        if (position := self._space.allocate(num_bytes)) is None:
            return None
        at = HEADER_BYTES + position % self._space.size_bytes
        return position, self._view[at : at + num_bytes]

    def free_up_to(self, position: int) -> None:
        self._space.free_up_to(position)

    def close(self) -> None:
        """Give up this end's hold. Slabs that are still being written keep the mapping until they are dropped."""
        os.close(self._fd)
        self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()


class RingReader:
    """The other end. Raises RingUnavailable, saying why, unless the offer names a ring that can be trusted."""

    def __init__(self, offer: RingOffer) -> None:
        self._size = offer.size_bytes
        try:
            fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise RingUnavailable(f"the ring of process {offer.pid} is out of reach: {error.strerror}") from None
        try:
            self._map = self._open(fd, offer)
        except (OSError, ValueError) as error:
            raise RingUnavailable(f"the ring of process {offer.pid} cannot be mapped: {error}") from None
        finally:
            os.close(fd)

    @staticmethod
    def _open(fd: int, offer: RingOffer) -> mmap.mmap:
        info = os.fstat(fd)
        size = HEADER_BYTES + offer.size_bytes
        if not stat.S_ISREG(info.st_mode) or info.st_size != size or fcntl.fcntl(fd, fcntl.F_GET_SEALS) != SEALS:
            raise RingUnavailable(f"what process {offer.pid} has there is not a ring")
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        if mapped[: len(offer.secret) // 2] != bytes.fromhex(offer.secret):
            raise RingUnavailable(f"process {offer.pid} here is not the one that made the offer")
        return mapped

    def view(self, position: int, num_bytes: int) -> memoryview | None:
        """The bytes at a position; None for a span that no writer would make."""
        start = position % self._size
        if num_bytes > self._size - start:
            return None
        at = HEADER_BYTES + start
        return memoryview(self._map)[at : at + num_bytes]
