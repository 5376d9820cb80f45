"""A device for tests and dry runs: host memory that other processes can open, and streams that run late.

What is launched on a stream is done when the test lets it (`advance`), or behind its back by a thread that lags.
Memory and events are shared between processes as CUDA shares them, so an order that is wrong shows in the bytes: what
was not written yet is not there, and what was written over is gone.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from ..engine.kv_cache import KVCache
from ..transfer.device import DeviceSpan
from ..transfer.errors import RingUnavailable
from ..transfer.layout import KVLayout
from ..transfer.offers import DeviceIdentity

HANDLE = struct.Struct("<qqqq")  # process, descriptor, size, number of an event
EVENT = struct.Struct("<qq")  # how often it was recorded, and which of these times is over
MAX_EVENTS = 8192
OPENERS = struct.Struct("<8q")  # behind the memory: the processes that have it open
WAIT_S = 20.0
POLL_S = 0.001


class Shared:
    """A memfd of this process or another, mapped."""

    def __init__(self, pid: int, fd: int, size: int) -> None:
        self.size = size
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RingUnavailable(f"fake driver: {error.strerror}") from None
        self.map = mmap.mmap(own, size)
        os.close(own)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


def make_shared(size: int) -> tuple[int, Shared]:
    fd = os.memfd_create("fake-device")
    os.ftruncate(fd, size)
    return fd, Shared(os.getpid(), fd, size)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class FakeDevice:
    """Implements `Device`. With `lag_s` a thread does one thing of each stream in so much time, and whoever waits for a
    stream has all of it done now: work is late as long as nobody waits for it."""

    def __init__(self, identity: DeviceIdentity, reachable: set[str] | None = None, lag_s: float = 0.0) -> None:
        self.identity = identity
        self.compute_stream = 1
        self.refuses_imports = ""
        self.live_allocations = 0
        self._reachable = reachable or set()
        self._numbers = itertools.count(2)
        self._streams: dict[int, deque[Callable[[], bool]]] = {1: deque()}
        self._memory: dict[int, tuple[int, Shared]] = {}  # address → descriptor (-1 if another's), memory
        self._tables: dict[tuple[int, int], Shared] = {}  # of other devices
        self._table_fd, self._table = make_shared(MAX_EVENTS * EVENT.size)
        self._next_event = itertools.count()
        self._spare_events: list[int] = []
        self._events: dict[int, tuple[Shared, int]] = {}
        self._lock = threading.RLock()
        self._lag_s = lag_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if lag_s:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._lag_s:
            self._thread.join(WAIT_S)
        os.close(self._table_fd)

    def reaches(self, other: DeviceIdentity) -> str:
        return "" if other.uuid in self._reachable else f"no peer access from {self.identity.bus} to {other.bus}"

    # --- streams ---------------------------------------------------------------------------------------------

    def launch(self, stream: int, work: Callable[[], object]) -> None:
        """What a kernel or a copy would be."""

        def once() -> bool:
            work()
            return True

        with self._lock:
            self._streams[stream].append(once)

    def advance(self, stream: int, count: int = 1) -> int:
        """Let a stream do as much, unless it has to wait. Returns how much it did."""
        done = 0
        with self._lock:
            queue = self._streams[stream]
            while done < count and queue and queue[0]():
                queue.popleft()
                done += 1
        return done

    def advance_all(self) -> None:
        while sum(self.advance(stream, 1 << 30) for stream in self.streams) > 0:
            pass

    @property
    def streams(self) -> list[int]:
        return list(self._streams)

    def _run(self) -> None:
        while not self._closed.wait(self._lag_s):
            for stream in self.streams:
                self.advance(stream)

    def create_stream(self) -> int:
        stream = next(self._numbers)
        with self._lock:
            self._streams[stream] = deque()
        return stream

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            assert not self._streams.pop(stream), "a stream destroyed with work on it"

    def synchronize(self, stream: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while self._streams[stream]:
            assert time.monotonic() < deadline, "a stream does not come to its end"
            if not self._lag_s:
                self.advance_all()
            elif not self.advance(stream, 1 << 30):
                self._closed.wait(POLL_S)  # it waits for another stream

    # --- memory ----------------------------------------------------------------------------------------------

    def malloc(self, num_bytes: int) -> int:
        fd, memory = make_shared(num_bytes + OPENERS.size)
        self._memory[memory.address] = fd, memory
        self.live_allocations += 1
        return memory.address

    def free(self, address: int) -> None:
        fd, memory = self._memory.pop(address)
        openers = [pid for pid in OPENERS.unpack_from(memory.map, memory.size - OPENERS.size) if pid and is_alive(pid)]
        assert not openers, f"freed while processes {openers} have it open"
        os.close(fd)
        self.live_allocations -= 1

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def view(self, address: int, num_bytes: int) -> memoryview:
        return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")

    def export_memory(self, address: int) -> bytes:
        fd, memory = self._memory[address]
        return HANDLE.pack(os.getpid(), fd, memory.size, 0)

    def import_memory(self, handle: bytes) -> int:
        if self.refuses_imports:
            raise RingUnavailable(self.refuses_imports)
        pid, fd, size, _ = HANDLE.unpack(handle)
        memory = Shared(pid, fd, size)
        self._memory[memory.address] = -1, memory
        self._change_openers(memory, 0, os.getpid())
        return memory.address

    def release_memory(self, address: int) -> None:
        _, memory = self._memory.pop(address)
        self._change_openers(memory, os.getpid(), 0)

    @staticmethod
    def _change_openers(memory: Shared, old: int, new: int) -> None:
        place = memory.size - OPENERS.size
        openers = list(OPENERS.unpack_from(memory.map, place))
        openers[openers.index(old)] = new
        OPENERS.pack_into(memory.map, place, *openers)

    # --- events ----------------------------------------------------------------------------------------------

    def create_event(self, *, shared: bool) -> int:
        event = next(self._numbers)
        index = self._spare_events.pop() if self._spare_events else next(self._next_event)
        self._events[event] = self._table, index
        EVENT.pack_into(self._table.map, index * EVENT.size, 0, 0)
        return event

    def export_event(self, event: int) -> bytes:
        return HANDLE.pack(os.getpid(), self._table_fd, self._table.size, self._events[event][1])

    def import_event(self, handle: bytes) -> int:
        pid, fd, size, index = HANDLE.unpack(handle)
        if (pid, fd) not in self._tables:
            self._tables[pid, fd] = Shared(pid, fd, size)
        event = next(self._numbers)
        self._events[event] = self._tables[pid, fd], index
        return event

    def destroy_event(self, event: int) -> None:
        table, index = self._events.pop(event)
        if table is self._table:
            self._spare_events.append(index)

    def _counts(self, event: tuple[Shared, int]) -> tuple[int, int]:
        recorded, over = EVENT.unpack_from(event[0].map, event[1] * EVENT.size)
        return recorded, over

    def record(self, event: int, stream: int) -> None:
        table, index = known = self._events[event]
        self._closed.wait(self._lag_s)  # a header that leaves too early overtakes this
        with self._lock:
            recorded, over = self._counts(known)
            EVENT.pack_into(table.map, index * EVENT.size, recorded + 1, over)
            offset = index * EVENT.size + 8
            self.launch(stream, lambda: struct.pack_into("<q", table.map, offset, recorded + 1))

    def wait(self, stream: int, event: int) -> None:
        known = self._events[event]
        with self._lock:
            recorded, _ = self._counts(known)
            self._streams[stream].append(lambda: self._counts(known)[1] >= recorded)

    def is_over(self, event: int) -> bool:
        recorded, over = self._counts(self._events[event])
        return over >= recorded


class DeviceCache(KVCache):
    """Blocks that belong to a device: copies of slabs are launched on its streams. Whatever looks the tensors up (the
    copy of a block, a swap) waits for the compute stream, as kernels launched on it would; a model's layers look them
    up only once, and have to be made to wait."""

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int, device: FakeDevice) -> None:
        self.peer_memory = device
        super().__init__(layout, num_blocks, block_size)

    @property
    def keys(self) -> list[Tensor]:
        self.peer_memory.synchronize(self.peer_memory.compute_stream)
        return self._keys

    @keys.setter
    def keys(self, keys: list[Tensor]) -> None:
        self._keys = keys

    def _late(self) -> KVCache:
        """The same blocks, for what a stream does."""
        plain = KVCache(self.layout, 1, self.block_size)
        plain.keys, plain.values, plain.num_blocks = self._keys, self.values, self.num_blocks
        return plain

    def gather_to(self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, out: DeviceSpan) -> None:
        target, table = self.peer_memory.view(out.address, out.nbytes), list(blocks)
        layers = range(layer, layer + 1)
        self.peer_memory.launch(
            out.stream, lambda: self._late().gather(layers, table, first_token, num_tokens, target)
        )  # fmt: skip

    def scatter_from(
        self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, payload: DeviceSpan
    ) -> None:
        source, table = self.peer_memory.view(payload.address, payload.nbytes), list(blocks)
        layers = range(layer, layer + 1)
        self.peer_memory.launch(
            payload.stream, lambda: self._late().scatter(layers, table, first_token, num_tokens, source)
        )  # fmt: skip
