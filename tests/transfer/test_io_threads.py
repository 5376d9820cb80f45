"""ZeroMQ's threads get their turn beside a thread that computes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import threading
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
    near, far = made.socket(zmq.PAIR), made.socket(zmq.PAIR)  # the first one starts the threads
    near.connect(f"tcp://127.0.0.1:{far.bind_to_random_port('tcp://127.0.0.1')}")
    near.send(b"")
    assert far.poll(10_000), "they run"
    yield made
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
    return [int(task.name) for task in tasks if (task / "comm").read_bytes().startswith(NAME) == of_zeromq]


def test_only_the_slices_of_zeromq_threads_become_short(context: zmq.Context[Any]) -> None:
    before = {thread: scheduling_of(thread) for thread in threads(True) + threads(False)}
    if before[os.getpid()][2] == 0:
        pytest.skip("slices are the same for all threads here (Linux before 6.12)")
    assert hasten_io_threads() == len(threads(True)) > 0
    for thread in threads(True):
        assert scheduling_of(thread) == (*before[thread][:2], SLICE_NS)
    for thread in set(threads(False)) & set(before):
        assert scheduling_of(thread) == before[thread]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.E2BIG])
def test_a_system_that_refuses_is_no_reason_to_fail(
    context: zmq.Context[Any], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Refusing:
        def syscall(self, *arguments: object) -> int:
            asked.append(arguments)
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_: Refusing())
    assert hasten_io_threads() == 0
    assert bool(asked) == (platform.machine() in SCHED_GETATTR)


def test_a_processor_whose_call_is_not_known_is_left_alone(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert hasten_io_threads() == 0


def test_a_thread_of_others_may_have_any_name(context: zmq.Context[Any]) -> None:
    """A name of more than 15 bytes is cut, maybe within a letter."""
    expected, named, end = hasten_io_threads(), threading.Event(), threading.Event()

    def other() -> None:
        Path("/proc/thread-self/comm").write_bytes("ein Fädchen für".encode()[:6])
        named.set()
        end.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert named.wait(10)
        assert hasten_io_threads() == expected
    finally:
        end.set()
        thread.join()


def test_a_process_without_zeromq_threads_is_left_alone() -> None:
    if threads(True):
        pytest.skip("another test has left a context")
    assert hasten_io_threads() == 0
