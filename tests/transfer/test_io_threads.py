"""ZeroMQ's threads get their turn beside a thread that computes."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pdserve.transfer.io_threads import NAME, SLICE_NS, hasten_io_threads

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    socket = made.socket(zmq.DEALER)  # the first one starts the threads
    yield made
    socket.close(linger=0)
    made.destroy(linger=0)


def scheduling_of(thread: int) -> tuple[int, int, int]:
    """(policy, nice, slice in ns)"""
    room = ctypes.create_string_buffer(48)
    number = SCHED_GETATTR.get(platform.machine())
    if number is None or ctypes.CDLL(None).syscall(ctypes.c_long(number), thread, room, 48, 0) != 0:
        pytest.skip("this system does not say how a thread is scheduled")
    _, policy, _, nice, _, slice_ns, _, _ = struct.unpack("=IIQiIQQQ", room.raw)
    return policy, nice, slice_ns


def threads(of_zeromq: bool) -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text().startswith(NAME) == of_zeromq]


def test_only_the_slices_of_zeromq_threads_become_short(context: zmq.Context[Any]) -> None:
    before = {thread: scheduling_of(thread) for thread in threads(True) + threads(False)}
    if before[os.getpid()][2] == 0:
        pytest.skip("slices are the same for all threads here (Linux before 6.12)")
    assert hasten_io_threads() == len(threads(True)) > 0
    for thread in threads(True):
        assert scheduling_of(thread) == (*before[thread][:2], SLICE_NS)
    for thread in set(threads(False)) & set(before):
        assert scheduling_of(thread) == before[thread]


def test_a_process_without_zeromq_threads_is_left_alone() -> None:
    if threads(True):
        pytest.skip("another test has left a context")
    assert hasten_io_threads() == 0
