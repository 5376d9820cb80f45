"""Leases where the system has no locks of open files."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from pdserve.transfer.errors import RingUnavailable
from pdserve.transfer.lease import HeldLease, Lease


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPERM], ids=["unknown", "not permitted"])
def test_without_locks_of_open_files_there_is_no_lease_and_no_descriptor_left(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(fd: int, command: int, argument: object = 0) -> object:
        raise OSError(code, os.strerror(code))

    offered = Lease()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "fcntl", without_locks)
    with pytest.raises(RingUnavailable, match="no locks"):
        Lease()
    with pytest.raises(RingUnavailable, match="no locks"):
        HeldLease(offered.offer)
    assert len(os.listdir("/proc/self/fd")) == before
    offered.close()
