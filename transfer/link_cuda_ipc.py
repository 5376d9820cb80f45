"""The `cuda_ipc` link: a ring in the memory of the receiver's device, written by the sender's.

    receiver  DeviceRing         allocates, offers (in its Welcome), reads, gives credit
    sender    DeviceRingWriter   opens, copies blocks into it on a side stream, publishes

Four orders keep it whole:

1. The sender's side stream waits for what computed the KV, copies it, and records the span's event; only then does the
   header leave. The compute stream goes on with the next layer meanwhile.
2. The receiver holds a header back until its event is over, so that neither its loop nor its compute stream ever waits
   for the sender's computing. Then it copies on its own compute stream: steps that read those blocks, and whoever gets
   them next, come behind.
3. Credit is given when that copy is over, and only then does the sender write there again.
4. The memory is freed only when the sender has let go of its lease, or was killed (`lease.py`).

The allocation is the ring's own, since a handle always names a whole allocation: torch's allocator packs many tensors
into one, or maps them in ways that have no handle. Payloads have no checksum: they never leave the devices, whose
memory and links correct or report errors themselves, and to take one would make the sender wait for every slab.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque

from .device import Device, DeviceSpan
from .errors import RingUnavailable
from .lease import SECRET_BYTES, HeldLease, Lease
from .offers import DeviceRingOffer, RingSpan
from .ring import RingSpace, whole_units

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
NUM_EVENTS = 512  # spans that may be under way: a step makes one for every layer of every prompt in it
MAX_RINGS = 16  # each takes device memory before anybody has proved to need it
CLAIM_S = 30.0  # an offer that nobody has taken up by then is taken back
GRACE_S = 1.0  # from the end of a lease to the end of the memory: a killed sender's last copy may still run


class DeviceRingWriter:
    """The sender's end. Raises RingUnavailable, saying why, unless the memory that is meant can be opened."""

    def __init__(self, device: Device, offer: DeviceRingOffer) -> None:
        self._device = device
        self._space = RingSpace(offer.size_bytes)
        self._ends: deque[int] = deque()  # of the spans under way
        self._used = 0  # spans so far; each takes the next event
        with contextlib.ExitStack() as undo:
            lease = HeldLease(offer.lease)
            undo.callback(lease.let_go)
            memory = device.import_memory(offer.memory)
            undo.callback(device.release_memory, memory)
            if device.read(memory, SECRET_BYTES) != bytes.fromhex(offer.lease.secret):
                raise RingUnavailable("the handle opens memory, but not the memory that was offered")
            self._base = memory + offer.offset
            self._events = [device.import_event(handle) for handle in offer.events]
            for event in self._events:
                undo.callback(device.destroy_event, event)
            self._computed = device.create_event(shared=False)
            undo.callback(device.destroy_event, self._computed)
            self._stream = device.create_stream()
            undo.callback(device.destroy_stream, self._stream)
            self._undo = undo.pop_all()

    @property
    def head(self) -> int:
        return self._space.head

    @property
    def is_idle(self) -> bool:
        """Has all that was published been copied? Until then the blocks it comes from must stay as they are."""
        return self._used == 0 or self._device.is_over(self._events[(self._used - 1) % len(self._events)])

    def allocate(self, num_bytes: int) -> tuple[RingSpan, DeviceSpan] | None:
        """Room for what the compute stream has computed so far, to be written on the span's stream; None if full."""
        if len(self._ends) == len(self._events) or (position := self._space.allocate(num_bytes)) is None:
            return None
        self._device.record(self._computed, self._device.compute_stream)
        self._device.wait(self._stream, self._computed)
        span = RingSpan(position, num_bytes, self._used % len(self._events))
        self._used += 1
        self._ends.append(position + num_bytes)
        address = self._base + position % self._space.size_bytes
        return span, DeviceSpan(address, num_bytes, self._stream)

    def publish(self, span: RingSpan) -> None:
        """What fills the span has been launched. Before its header leaves, since the receiver looks at the event."""
        self._device.record(self._events[span.slot], self._stream)

    def free_up_to(self, position: int) -> None:
        if position > self._space.head:
            return
        self._space.free_up_to(position)
        while self._ends and self._ends[0] <= position:
            self._ends.popleft()

    def close(self) -> None:
        """Wait for what is being copied, and let go: the receiver may free the memory from then on."""
        self._device.synchronize(self._stream)
        self._undo.close()


class DeviceRing:
    """The receiver's end for one sender. Raises RingUnavailable when the device does not give it."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device = device
        self._size = whole_units(size_bytes)
        self._spare: list[int] = []  # events of ours that mark no copy at present
        self._marks: deque[tuple[int, int]] = deque()  # (event, position): copies from before it are over with it
        self._taken = 0
        self._marked = 0
        self._credit = 0
        with contextlib.ExitStack() as undo:
            lease = Lease()
            undo.callback(lease.close)
            memory = device.malloc(HEADER_BYTES + self._size)
            undo.callback(device.free, memory)
            device.write(memory, bytes.fromhex(lease.offer.secret))
            self._base = memory + HEADER_BYTES
            self._events = [device.create_event(shared=True) for _ in range(NUM_EVENTS)]
            for event in self._events:
                undo.callback(device.destroy_event, event)
            handles = [device.export_event(event) for event in self._events]
            handle = device.export_memory(memory)
            self._lease = lease
            self.offer = DeviceRingOffer(handle, HEADER_BYTES, self._size, handles, lease.offer)
            self._undo = undo.pop_all()

    def is_possible(self, span: RingSpan) -> bool:
        """Might a sender that keeps to the rules have made it?"""
        start = span.position % self._size
        return span.num_bytes <= self._size - start and span.slot < NUM_EVENTS

    def has_arrived(self, span: RingSpan) -> bool:
        return self._device.is_over(self._events[span.slot])

    def view(self, span: RingSpan) -> DeviceSpan:
        """The bytes of a possible span that has arrived, to be read on the compute stream of now."""
        stream = self._device.compute_stream
        self._device.wait(stream, self._events[span.slot])
        return DeviceSpan(self._base + span.position % self._size, span.num_bytes, stream)

    def taken_up_to(self, position: int) -> None:
        """Whatever shall be copied from before this position has been launched on the compute stream."""
        self._taken = max(self._taken, position)

    def settle(self) -> int:
        """The position before which every copy is over: it may be written over."""
        if self._taken > self._marked:
            event = self._spare.pop() if self._spare else self._device.create_event(shared=False)
            self._device.record(event, self._device.compute_stream)
            self._marks.append((event, self._taken))
            self._marked = self._taken
        while self._marks and self._device.is_over(self._marks[0][0]):
            event, self._credit = self._marks.popleft()
            self._spare.append(event)
        return self._credit

    @property
    def is_settled(self) -> bool:
        return self._taken == self._credit

    def reclaim(self) -> bool:
        """Has the sender let go of the memory? It cannot get it back then."""
        return self._lease.take_back()

    def free(self) -> None:
        """Only after `reclaim`."""
        self._device.synchronize(self._device.compute_stream)  # a copy out of it may be under way
        for event in (*self._spare, *(event for event, _ in self._marks)):
            self._device.destroy_event(event)
        self._undo.close()


class DeviceRings:
    """The rings of one receiver, by the identity of the sender, and those that wait to be freed."""

    def __init__(self, device: Device | None, size_bytes: int) -> None:
        self._device = device
        self._size_bytes = size_bytes
        self._rings: dict[str, DeviceRing] = {}
        self._offered_at: dict[str, float] = {}
        self._dropped: list[tuple[DeviceRing, float | None]] = []  # and when it was reclaimed

    def get(self, identity: str) -> DeviceRing | None:
        return self._rings.get(identity)

    def offer(self, identity: str) -> DeviceRingOffer:
        """The sender's ring, made if it has none. Raises RingUnavailable."""
        if self._device is None:
            raise RingUnavailable("the decode worker does not compute on a CUDA device")
        if identity not in self._rings:
            if len(self._rings) + len(self._dropped) >= MAX_RINGS:
                raise RingUnavailable(f"the decode worker has {MAX_RINGS} rings already")
            self._rings[identity] = DeviceRing(self._device, self._size_bytes)
            self._offered_at[identity] = time.monotonic()
        return self._rings[identity].offer

    def drop(self, identity: str) -> None:
        """The sender is gone, or uses another link. Its memory stays until it has let go of it."""
        if (ring := self._rings.pop(identity, None)) is not None:
            self._offered_at.pop(identity, None)
            self._dropped.append((ring, None))

    def free_what_is_over(self) -> None:
        now = time.monotonic()
        for identity in [name for name, since in self._offered_at.items() if now - since > CLAIM_S]:
            del self._offered_at[identity]
            if self._rings[identity].reclaim():
                log.warning("%s has not opened the device memory that it was offered", identity)
                self.drop(identity)
        waiting: list[tuple[DeviceRing, float | None]] = []
        for ring, reclaimed_at in self._dropped:
            if reclaimed_at is not None and now - reclaimed_at > GRACE_S:
                ring.free()
            elif reclaimed_at is None and ring.reclaim():
                waiting.append((ring, now))
            else:
                waiting.append((ring, reclaimed_at))
        self._dropped = waiting

    @property
    def are_settled(self) -> bool:
        return all(ring.is_settled for ring in self._rings.values())

    def close(self) -> None:
        """Free what nobody has open. The rest ends with this process, behind which the driver cleans up."""
        for identity in list(self._rings):
            self.drop(identity)
        for ring, reclaimed_at in self._dropped:
            if reclaimed_at is not None or ring.reclaim():
                ring.free()
        self._dropped = []
