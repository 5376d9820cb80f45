"""The door for slabs: two sockets that prefill workers connect to, the rings they share, hellos, credits, and who gets
told "gone".
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import zmq

from ..transfer.channel import FrameCounts, Received, Router
from ..transfer.device import Device, DeviceSpan
from ..transfer.errors import LayoutMismatch, RingUnavailable
from ..transfer.keys import Curve
from ..transfer.layout import KVLayout
from ..transfer.link_cuda_ipc import DeviceRings
from ..transfer.links import LinkMode, offered
from ..transfer.messages import (
    Abort,
    Credit,
    Gone,
    Handoff,
    Hello,
    HelloDenied,
    PeerHeartbeat,
    Slab,
    Welcome,
)
from ..transfer.offers import MAX_POSITION, DeviceRingOffer, RingOffer
from ..transfer.ring import DEFAULT_RING_BYTES, RingReader

log = logging.getLogger(__name__)

WINDOW_BYTES = 256 * 1024 * 1024
MAX_PEERS = 4096
CONTROL_PER_POLL = 200  # messages; polled between the layers of a step, which a flood must not stretch
UNWANTED_PER_POLL = 32
MIN_COST_BYTES = 4096  # of the budget, for every message: one without a payload costs time as well
SILENT_S = 2.0  # a peer that says nothing for so long may come back under another identity


@dataclass
class Ring:
    """A sender's memory, and the position up to which it has been read (or given up)."""

    offer: RingOffer
    reader: RingReader
    position: int = 0


def worker_of(identity: str) -> str:
    """Identities are "<worker id>/<connection number>"."""
    return identity.rpartition("/")[0]


class Intake:
    """Bulk and control sockets of one decode worker."""

    def __init__(
        self,
        context: zmq.Context[Any],
        bulk_address: str,
        peer_address: str,
        layout: KVLayout,
        counts: FrameCounts,
        curve: Curve | None = None,
        mode: LinkMode = "auto",
        device: Device | None = None,
        ring_bytes: int = DEFAULT_RING_BYTES,
    ) -> None:
        """`device`: what this worker computes on, if not the processor; `ring_bytes`: of each ring in its memory."""
        self._layout = layout
        self._links = offered(mode, device is not None)
        self._counts = counts
        self._bulk = Router(context, bulk_address, counts, curve, bulk=True)
        self._control = Router(context, peer_address, counts, curve)
        self._consumed: dict[str, int] = {}  # identity → payload bytes taken in or dropped, in all
        self._credited: dict[str, tuple[int, int]] = {}  # what each was told: that, and a position in its ring
        self._rings: dict[str, Ring] = {}
        self._device_rings = DeviceRings(device, ring_bytes)
        self._held: dict[str, deque[Received]] = {}  # by sender: a slab that is still being written, and all behind it
        self._heard_at: dict[str, float] = {}
        self._probed_at: dict[str, float] = {}
        self._bulk_here: dict[str, int] = {}  # identity → connection, of bulk sockets that have said hello
        self._early: dict[str, tuple[Received, Hello, str]] = {}  # hellos that came before that
        self._told_gone: set[tuple[str, str, int]] = set()

    @property
    def addresses(self) -> tuple[str, str]:
        """(bulk, control)"""
        return self._bulk.address, self._control.address

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        return self._bulk.socket, self._control.socket

    def poll_control(self, worker: str) -> Iterator[tuple[str, PeerHeartbeat]]:
        """Answer hellos; yields (identity, heartbeat)."""
        for received in self._control.receive(CONTROL_PER_POLL):
            match received.message:
                case Hello() as hello:
                    self._greet(received, hello, worker)
                case PeerHeartbeat() as heartbeat:
                    if received.sender not in self._consumed:
                        self._counts.drop("stranger")
                        self._control.blame(received.connection)
                        continue
                    self._control.trust(received.connection)
                    self._heard_at[received.sender] = time.monotonic()
                    yield received.sender, heartbeat
                case other:
                    self._counts.drop("unexpected")
                    self._control.blame(received.connection)
                    log.debug("unexpected %s from %s", other.kind, received.sender)

    def _greet(self, received: Received, hello: Hello, worker: str) -> None:
        """Let a prefill worker in, once both of its sockets are here."""
        identity = received.sender
        full = identity not in self._consumed and len(self._consumed) >= MAX_PEERS
        if worker_of(identity) != hello.worker or full or self._is_taken(identity, worker):
            self._counts.drop("identity")
            self._control.blame(received.connection)
            return
        try:
            self._layout.require_equal(hello.layout, worker, hello.worker)
        except LayoutMismatch as error:
            self._control.send(identity, HelloDenied(str(error)))
            self._control.blame(received.connection)
            return
        if identity not in self._bulk_here:
            if len(self._early) < MAX_PEERS:
                self._early[identity] = received, hello, worker
            return
        link, why_not, ring = self._agree(identity, hello)
        if link not in self._links:
            self._control.send(identity, HelloDenied(f"{worker}: {why_not or f'{link} is not wanted (--link)'}"))
            return
        self._control.trust(received.connection)
        self._bulk.trust(self._bulk_here[identity])  # whichever hello came first: its first slab may be a large one
        self._heard_at[identity] = time.monotonic()
        self._consumed.setdefault(identity, 0)
        self._credited[identity] = self._consumed[identity], 0
        self._control.send(identity, Welcome(worker, WINDOW_BYTES, link, why_not, ring))

    def _agree(self, identity: str, hello: Hello) -> tuple[str, str, DeviceRingOffer | None]:
        """(link, why not the one that the sender wants, its ring in our device memory)"""
        if hello.link != "cuda_ipc":
            self._device_rings.drop(identity)
            why_not = self._attach(identity, hello)
            return ("shm" if identity in self._rings else "zmq"), why_not, None
        try:
            return "cuda_ipc", "", self._device_rings.offer(identity)
        except RingUnavailable as error:
            return "zmq", str(error), None

    def _attach(self, identity: str, hello: Hello) -> str:
        """Map the ring that is offered, if there is one and it may be used. Returns why not."""
        if hello.ring is None:
            return ""
        if "shm" not in self._links:
            return "the decode worker does not offer it (--link)"
        known = self._rings.get(identity)
        if known is not None and known.offer == hello.ring:
            return ""
        try:
            self._rings[identity] = Ring(hello.ring, RingReader(hello.ring))
        except RingUnavailable as error:
            self._rings.pop(identity, None)
            return str(error)
        return ""

    def _is_taken(self, identity: str, worker: str) -> bool:
        """Is that prefill worker here already, under another identity that is alive? Then this is somebody else."""
        now = time.monotonic()
        return any(
            worker_of(other) == worker_of(identity)
            and now - self._heard_at[other] < SILENT_S
            and self._control.send(other, PeerHeartbeat(worker, []))
            for other in self._consumed
            if other != identity
        )

    def _bulk_hello(self, received: Received) -> None:
        """The first word on a bulk socket. Who it is remains to be said on the other."""
        if len(self._bulk_here) >= 2 * MAX_PEERS:
            self._bulk_here = {known: at for known, at in self._bulk_here.items() if known in self._consumed}
        self._bulk_here[received.sender] = received.connection
        self._bulk.blame(received.connection)  # it is said once; whoever goes on saying it is a flood
        if (early := self._early.pop(received.sender, None)) is not None:
            self._greet(*early)

    def poll_bulk(self, budget_bytes: int) -> Iterator[Received]:
        """Slabs, handoffs and aborts, in order, until about `budget_bytes` of payload have been taken in."""
        unwanted = 0
        for waited in self._no_longer_held():
            budget_bytes -= max(_payload_bytes(waited), MIN_COST_BYTES)
            yield from self._deliver(waited)
            if budget_bytes <= 0:
                return
        while budget_bytes > 0 and unwanted < UNWANTED_PER_POLL:
            received = next(iter(self._bulk.receive(limit=64)), None)
            if received is None:
                return
            if isinstance(received.message, Hello):
                unwanted += 1
                self._bulk_hello(received)
            elif received.sender not in self._consumed:
                unwanted += 1
                self._counts.drop("stranger")
                self._bulk.blame(received.connection)
            elif not isinstance(received.message, Slab | Handoff | Abort):
                self._bulk.trust(received.connection)
                self._counts.drop("unexpected")
            else:
                self._bulk.trust(received.connection)
                if received.sender in self._held or self._is_being_written(received):
                    self._held.setdefault(received.sender, deque()).append(received)
                else:
                    yield from self._deliver(received)
            budget_bytes -= max(_payload_bytes(received), MIN_COST_BYTES)

    def _deliver(self, received: Received) -> Iterator[Received]:
        assert isinstance(received.message, Slab | Handoff | Abort)
        if (whole := self._with_payload(received)) is not None:
            yield whole
        self._note_consumed(received.sender, received.message, _payload_bytes(received))

    def _is_being_written(self, received: Received) -> bool:
        """Is it a slab whose bytes are not in our device memory yet? Its sender's device may be far behind."""
        span = received.message.span if isinstance(received.message, Slab) else None
        ring = self._device_rings.get(received.sender)
        return span is not None and ring is not None and ring.is_possible(span) and not ring.has_arrived(span)

    def _no_longer_held(self) -> Iterator[Received]:
        """What can be delivered of what had to wait; more of the same sender only behind it."""
        for identity, queue in list(self._held.items()):
            while queue and not self._is_being_written(queue[0]):
                received = queue.popleft()
                if not queue:
                    self._held.pop(identity, None)
                yield received

    @property
    def must_look_again(self) -> bool:
        """Does something wait for a device, which will not say when it is done?"""
        return bool(self._held) or not self._device_rings.are_settled

    def _with_payload(self, received: Received) -> Received | None:
        """The slab with its bytes, wherever they are; None, and counted, if they are nowhere."""
        span = received.message.span if isinstance(received.message, Slab) else None
        if span is None:
            return received
        if (device_ring := self._device_rings.get(received.sender)) is not None:
            if device_ring.is_possible(span):
                return replace(received, payload=device_ring.view(span))
        elif (ring := self._rings.get(received.sender)) is not None:
            payload = ring.reader.view(span.position, span.num_bytes)
            if payload is not None:
                return replace(received, payload=payload)
        self._counts.drop("bad_span")
        return None

    def link_of(self, received: Received) -> str:
        """How the payload of a slab came."""
        if isinstance(received.payload, DeviceSpan):
            return "cuda_ipc"
        return "shm" if isinstance(received.message, Slab) and received.message.span else "zmq"

    def _note_consumed(self, identity: str, message: Slab | Handoff | Abort, size: int) -> None:
        """What has been looked at may be written over. Called when its receiver is done with it, not before."""
        self._consumed[identity] += size
        if not isinstance(message, Slab):
            position = message.ring_head
        elif message.span is not None:
            position = message.span.position + message.span.num_bytes
        else:
            return
        if (device_ring := self._device_rings.get(identity)) is not None:
            device_ring.taken_up_to(position)
        elif (ring := self._rings.get(identity)) is not None:
            ring.position = max(ring.position, position)

    def _position(self, identity: str) -> int:
        """How far into its ring the sender may write over what was there."""
        if (device_ring := self._device_rings.get(identity)) is not None:
            return device_ring.settle()
        ring = self._rings.get(identity)
        return ring.position if ring else 0

    def tell_gone(self, identity: str, request: str, attempt: int) -> None:
        """Make the sender of something unwanted stop; once per attempt and turn."""
        if (identity, request, attempt) not in self._told_gone:
            self._told_gone.add((identity, request, attempt))
            self._control.send(identity, Gone(request, attempt))

    def heartbeat(self, identity: str, worker: str, live: list[tuple[str, int]]) -> None:
        self._control.send(identity, PeerHeartbeat(worker, live))

    def send_credits(self) -> None:
        """Tell every sender how much has been consumed since the last time; forget senders that are gone, which those
        that have not been heard of for a while are tried for."""
        self._told_gone.clear()
        self._device_rings.free_what_is_over()
        now = time.monotonic()
        for identity, consumed in list(self._consumed.items()):
            credit = consumed, self._position(identity)
            told = credit == self._credited[identity]
            if told and now - max(self._heard_at[identity], self._probed_at.get(identity, 0.0)) < SILENT_S:
                continue
            if not self._control.send(identity, Credit(*(min(each, MAX_POSITION) for each in credit))):
                self._forget(identity)
                continue
            self._credited[identity] = credit
            self._probed_at[identity] = now

    def _forget(self, identity: str) -> None:
        del self._consumed[identity], self._credited[identity], self._heard_at[identity]
        self._rings.pop(identity, None)
        self._device_rings.drop(identity)
        self._held.pop(identity, None)
        self._probed_at.pop(identity, None)
        self._bulk_here.pop(identity, None)

    def close(self) -> None:
        self._bulk.close()
        self._control.close()
        self._device_rings.close()


def _payload_bytes(received: Received) -> int:
    if received.payload is not None:
        return received.payload.nbytes
    span = received.message.span if isinstance(received.message, Slab) else None
    return 0 if span is None else span.num_bytes
