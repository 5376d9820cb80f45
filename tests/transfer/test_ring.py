"""A ring hands bytes to one other process, reuses what was acknowledged, and trusts nobody's word."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.transfer.errors import RingUnavailable
from pdserve.transfer.ring import ALIGNMENT_BYTES, RingReader, RingSpace, RingWriter

SIZE = 64 * 1024
SHM = Path("/dev/shm")


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    ring = RingWriter(SIZE)
    yield ring
    ring.close()


def put(writer: RingWriter, content: bytes) -> int:
    room = writer.allocate(len(content))
    assert room is not None
    position, memory = room
    memory[:] = content
    return position


def test_what_was_written_is_read_where_the_position_says(writer: RingWriter) -> None:
    reader = RingReader(writer.offer)
    positions = [(put(writer, bytes([i]) * 100 * i), i) for i in range(1, 20)]
    for position, i in positions:
        assert reader.view(position, 100 * i) == bytes([i]) * 100 * i
        assert position % ALIGNMENT_BYTES == 0


@given(sizes=st.lists(st.integers(1, SIZE), max_size=60), seed=st.integers(0, 255))
def test_nothing_is_written_over_before_it_was_acknowledged(sizes: list[int], seed: int) -> None:
    writer = RingWriter(SIZE)
    reader = RingReader(writer.offer)
    waiting: list[tuple[int, bytes]] = []
    try:
        for number, size in enumerate(sizes):
            content = bytes([(seed + number) % 256]) * size
            while (room := writer.allocate(size)) is None:
                assert waiting, "an empty ring has room for all that fits into it"
                position, expected = waiting.pop(0)
                assert reader.view(position, len(expected)) == expected
                writer.free_up_to(position + len(expected))
            room[1][:] = content
            waiting.append((room[0], content))
        for position, expected in waiting:
            assert reader.view(position, len(expected)) == expected
    finally:
        writer.close()


STEPS = ["give", "free", "stale", "part", "far"]


@given(
    num_units=st.integers(1, 12),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 800)), max_size=80),
)
def test_an_account_equals_one_that_marks_every_unit(num_units: int, steps: list[tuple[str, int]]) -> None:
    """Pieces of any size, also without bytes; what frees them comes late, twice, too early, or names no piece."""
    size = num_units * ALIGNMENT_BYTES
    space, used = RingSpace(size), [False] * num_units
    live: list[tuple[int, range]] = []  # (position behind it, its units), the oldest first
    freed = 0
    for step, number in steps:
        if step == "give":
            before, units = space.head, max(1, -(-number // ALIGNMENT_BYTES))
            places = (range(at, at + units) for at in range(num_units - units + 1))
            expected = next((place for place in places if not any(used[unit] for unit in place)), None)
            position = space.allocate(number)
            assert (position is None) == (expected is None)
            if position is None or expected is None:
                assert space.head == before
                continue
            assert position >= before
            assert position % size == expected.start * ALIGNMENT_BYTES
            for unit in expected:
                used[unit] = True
            live.append((position + len(expected) * ALIGNMENT_BYTES, expected))
            assert space.head == live[-1][0]
        elif step == "stale":
            space.free_up_to(freed)
        elif step == "far":
            space.free_up_to(space.head + 1 + number)
        elif live:
            (end, _) = live[number % len(live)]
            upto = end if step == "free" else end - ALIGNMENT_BYTES
            space.free_up_to(upto)
            while live and live[0][0] <= upto:
                freed, units_of = live.pop(0)
                for unit in units_of:
                    used[unit] = False
    space.free_up_to(space.head)
    space.free_up_to(space.head)
    assert space.allocate(size) is not None, "all of it is there again"


def test_a_piece_without_bytes_takes_nobody_elses_place() -> None:
    space = RingSpace(4 * ALIGNMENT_BYTES)
    first, empty, last = space.allocate(64), space.allocate(0), space.allocate(64)
    assert None not in (first, empty, last)
    space.free_up_to(64)
    assert space.allocate(128) is None, "two pieces of four are in use"
    assert space.allocate(64) is not None


def test_what_was_read_last_is_written_again_first(writer: RingWriter) -> None:
    """So the memory in use stays in a cache, and is no more than what is under way."""
    positions = [put(writer, b"x" * 1000)]
    for _ in range(500):
        positions.append(put(writer, b"y" * 1000))
        writer.free_up_to(positions[-2] + 1000)
    assert {position % SIZE for position in positions} == {0, 1024}
    assert positions == sorted(set(positions)), "positions only ever grow"


def test_a_piece_is_free_when_all_of_it_was_acknowledged(writer: RingWriter) -> None:
    put(writer, b"x" * SIZE)
    writer.free_up_to(SIZE - 64)
    assert writer.allocate(1) is None
    writer.free_up_to(SIZE)
    assert writer.allocate(1) is not None


def test_a_gap_is_used_by_what_fits_into_it(writer: RingWriter) -> None:
    first, second = put(writer, b"a" * 4096), put(writer, b"b" * 4096)
    writer.free_up_to(first + 4096)
    large, small = put(writer, b"c" * 8192), put(writer, b"d" * 4096)
    assert [position % SIZE for position in (second, large, small)] == [4096, 8192, 0]


def test_what_does_not_fit_at_all_has_no_room(writer: RingWriter) -> None:
    assert writer.allocate(SIZE + 1) is None
    assert writer.allocate(SIZE) is not None
    assert writer.allocate(1) is None


def test_an_acknowledgement_of_what_was_never_written_is_not_believed(writer: RingWriter) -> None:
    put(writer, b"x" * SIZE)
    writer.free_up_to(1 << 40)
    assert writer.allocate(1) is None
    writer.free_up_to(SIZE)
    assert writer.allocate(1) is not None


@pytest.mark.parametrize(("position", "num_bytes"), [(0, SIZE + 1), (SIZE - 1, 2), (1 << 47, SIZE + 64)])
def test_a_span_that_leaves_the_ring_has_no_bytes(writer: RingWriter, position: int, num_bytes: int) -> None:
    assert RingReader(writer.offer).view(position, num_bytes) is None


def test_the_reader_cannot_change_what_the_writer_has(writer: RingWriter) -> None:
    position = put(writer, b"before")
    view = RingReader(writer.offer).view(position, 6)
    assert view is not None
    view[:] = b"after!"
    assert RingReader(writer.offer).view(position, 6) == b"before"


@pytest.mark.parametrize(
    "change",
    [{"secret": "0" * 32}, {"size_bytes": SIZE - 64}, {"size_bytes": 1 << 40}, {"fd": 1 << 20}, {"pid": 1 << 30}],
)
def test_an_offer_that_is_not_what_it_says_is_refused(writer: RingWriter, change: dict[str, object]) -> None:
    with pytest.raises(RingUnavailable, match="process"):
        RingReader(dataclasses.replace(writer.offer, **change))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/", __file__])
def test_a_descriptor_of_something_else_is_refused(writer: RingWriter, path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(RingUnavailable):
            RingReader(dataclasses.replace(writer.offer, fd=fd))
    finally:
        os.close(fd)


def test_memory_that_cannot_be_had_is_refused_at_once() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))
    try:
        with pytest.raises(RingUnavailable, match="no shared memory of"):
            RingWriter(SIZE)  # and its header
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refusing(code: int) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize(
    ("module", "call", "code"),
    [
        (os, "memfd_create", errno.ENOSYS),
        (os, "memfd_create", errno.EMFILE),
        (os, "posix_fallocate", errno.ENOSPC),
        (os, "posix_fallocate", errno.EOPNOTSUPP),
        (fcntl, "fcntl", errno.EPERM),
        (mmap, "mmap", errno.ENOMEM),
    ],
)
def test_a_system_that_gives_no_memory_is_named_and_left_as_it_was(
    module: ModuleType, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as broken:
        broken.setattr(module, call, refusing(code))
        with pytest.raises(RingUnavailable, match=os.strerror(code)):
            RingWriter(SIZE)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["mmap", "fcntl"])
def test_a_reader_that_cannot_map_it_keeps_nothing_open(
    writer: RingWriter, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as broken:
        broken.setattr(mmap if call == "mmap" else fcntl, call, refusing(errno.ENOMEM))
        with pytest.raises(RingUnavailable, match="cannot be mapped"):
            RingReader(writer.offer)
    assert sorted(os.listdir("/proc/self/fd")) == before


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("pdserve-ring")


def test_closed_memory_stays_only_as_long_as_somebody_writes_to_it() -> None:
    before = mappings()
    ring = RingWriter(SIZE)
    room = ring.allocate(100)
    assert room is not None
    memory = room[1]
    ring.close()
    memory[:] = b"x" * 100
    assert mappings() == before + 1
    del room, memory, ring
    assert mappings() == before


def test_the_writer_cannot_shrink_the_memory_under_the_reader(writer: RingWriter) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(writer.offer.fd, 0)


def test_a_killed_writer_leaves_the_reader_its_bytes_and_the_machine_nothing() -> None:
    code = (
        "import sys\n"
        "from pdserve.transfer.ring import RingWriter\n"
        "ring = RingWriter(65536)\n"
        "position, memory = ring.allocate(5)\n"
        "memory[:] = b'hello'\n"
        "offer = ring.offer\n"
        "print(offer.pid, offer.fd, offer.size_bytes, offer.secret, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        pid, fd, size, secret = child.stdout.readline().split()
        writer = RingWriter(SIZE)
        offer = dataclasses.replace(writer.offer, pid=int(pid), fd=int(fd), size_bytes=int(size), secret=secret)
        writer.close()
        reader = RingReader(offer)
        mapped = [Path(region.path) for region in psutil.Process(child.pid).memory_maps()]
    finally:
        child.kill()
        child.communicate(timeout=10)
    assert reader.view(0, 5) == b"hello"
    assert [path for path in mapped if SHM in path.parents and path.exists()] == []
    with pytest.raises(RingUnavailable, match="out of reach"):
        RingReader(offer)
