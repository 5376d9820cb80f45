"""A lease: by it the owner of memory that another process has opened knows when that process has let go of it.

It is a lock on a memfd that the owner makes. The holder opens it under `/proc/PID/fd/FD`, which shows as well that both
mean the same process by that number, and holds a shared lock while it has the memory open. The kernel drops the lock
with the holder's descriptor, so also when the holder is killed. The owner takes the lease back by an exclusive lock,
after which nobody can get it any more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct

from .errors import RingUnavailable
from .offers import RingOffer

SIZE_BYTES = 64
SECRET_BYTES = 16


def _lock(fd: int, kind: int) -> bool:
    """Take a lock that belongs to the open file (not to the process); False if somebody else's is in the way.

    Raises RingUnavailable where there are no such locks, as in some sandboxes."""
    whole_file = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise RingUnavailable(f"no locks of open files here: {error.strerror}") from None
    return True


class Lease:
    """The owner's end. Raises RingUnavailable when this machine does not give it."""

    def __init__(self) -> None:
        secret = secrets.token_bytes(SECRET_BYTES)
        try:
            self._fd = os.memfd_create("pdserve-lease", os.MFD_CLOEXEC)
        except OSError as error:
            raise RingUnavailable(f"no shared memory: {error.strerror}") from None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.close, self._fd)
            _lock(self._fd, fcntl.F_UNLCK)  # nothing is locked yet: are there such locks?
            os.pwrite(self._fd, secret.ljust(SIZE_BYTES, b"\0"), 0)
            on_failure.pop_all()
        self.offer = RingOffer(os.getpid(), self._fd, SIZE_BYTES, secret.hex())

    def take_back(self) -> bool:
        """True if nobody holds it, and from then on nobody can."""
        return _lock(self._fd, fcntl.F_WRLCK)

    def close(self) -> None:
        os.close(self._fd)


class HeldLease:
    """The holder's end. Raises RingUnavailable, saying why, unless the offer names a lease that can still be had."""

    def __init__(self, offer: RingOffer) -> None:
        path = f"/proc/{offer.pid}/fd/{offer.fd}"
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise RingUnavailable(f"process {offer.pid} is out of reach: {error.strerror}") from None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.close, self._fd)
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size != SIZE_BYTES:
                raise RingUnavailable(f"what process {offer.pid} has there is not a lease")
            if os.pread(self._fd, SECRET_BYTES, 0) != bytes.fromhex(offer.secret):
                raise RingUnavailable(f"process {offer.pid} here is not the one that made the offer")
            if not _lock(self._fd, fcntl.F_RDLCK):
                raise RingUnavailable(f"process {offer.pid} has taken its offer back")
            on_failure.pop_all()

    def let_go(self) -> None:
        os.close(self._fd)
