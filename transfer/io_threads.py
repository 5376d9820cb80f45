"""ZeroMQ's own threads send and receive while a worker computes, on the core that the worker is pinned to.

Linux lets whoever runs finish its slice (some 3 ms) before another thread of its core that has just woken, so a slab's
header, a credit or a token waited as long. A thread that asks for short slices gets its turn at once (from Linux 6.12
on; before, asking changes nothing). It gets no more of the processor for that.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from contextlib import suppress
from pathlib import Path

SLICE_NS = 100_000  # the shortest there is
NAME = b"ZMQbg/IO"
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the numbers of the system call; Python has no function for it


def hasten_io_threads() -> int:
    """Give the threads that ZeroMQ has started for input and output short slices; how many have got them.

    To be called when something has come through a socket, or a while after: before, they may not have their names yet.
    """
    tasks, number = Path("/proc/self/task"), SCHED_SETATTR.get(platform.machine())
    if number is None or not tasks.is_dir():
        return 0
    return sum(_hasten(int(task.name), number) for task in tasks.iterdir() if _is_io_thread(task))


def _is_io_thread(task: Path) -> bool:
    with suppress(OSError):  # it has just ended
        return (task / "comm").read_bytes().startswith(NAME)  # others may have cut theirs within a letter
    return False


def _hasten(thread: int, number: int) -> bool:
    """Everything else about the thread stays as it is."""
    with suppress(OSError):
        policy, nice = os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)
        if policy == os.SCHED_OTHER:
            # struct sched_attr: its size, policy, flags, nice, priority, runtime, deadline, period
            asked = struct.pack("=IIQiIQQQ", 48, policy, 0, nice, 0, SLICE_NS, 0, 0)
            return bool(ctypes.CDLL(None).syscall(ctypes.c_long(number), thread, asked, 0) == 0)
    return False
