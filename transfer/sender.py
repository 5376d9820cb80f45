"""The sending end: one `PeerLink` per decode worker, one `Outgoing` per attempt that sends to it.

    PeerLink    CONNECTING ──Welcome──▶ LINKED            hello carries the KV layout; a mismatch is refused here
                     └──HelloDenied──▶ REFUSED            (kept, with its reason, until the peer's next incarnation)

A slab's bytes are copied into the link's ring (of shared memory, or of the peer's device memory) if it has one with
room, else into a fresh buffer that is never reused, so ZeroMQ may read it whenever it gets to it. How much may be under
way is bounded by the window the receiver grants: bytes sent minus bytes it says it has consumed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import zmq

from .channel import Dealer, FrameCounts
from .device import Device, DeviceSpan
from .errors import ConfigError, RingUnavailable
from .keys import Curve
from .layout import KVLayout
from .link_cuda_ipc import DeviceRingWriter
from .links import LinkMode, Refusal, best_link
from .messages import (
    Abort,
    Credit,
    Gone,
    Handoff,
    Hello,
    HelloDenied,
    Message,
    Peer,
    PeerHeartbeat,
    Slab,
    TokenLogprobs,
    Welcome,
)
from .offers import DeviceRingOffer, RingSpan
from .reports import Link
from .ring import DEFAULT_RING_BYTES, RingWriter
from .slab import KVStore

log = logging.getLogger(__name__)

SLAB_BYTES = 8 * 1024 * 1024  # in a ring: every slab wakes decode, whose core may be lent to this very worker
FRAME_BYTES = 1024 * 1024  # as a frame, which passes through the kernel while the next is made
RING_SHARE = 8  # a slab is made no larger than one part in so many of its ring
HELLO_EVERY_S = 1.0
PEER_HEARTBEAT_EVERY_S = 0.5
LOST_AFTER_S = 10.0  # a peer that speaks, but has taken in nothing of a full window for so long, will never get it


class LinkState(Enum):
    CONNECTING = "connecting"
    LINKED = "linked"
    REFUSED = "refused"


@dataclass(frozen=True)
class LinkOptions:
    """What a worker does with every link alike. `host`: the machine it runs on; `device`: what it computes on, unless
    that is the processor; `ring_bytes`: of each shm link."""

    mode: LinkMode = "auto"
    host: str = ""
    device: Device | None = None
    ring_bytes: int = DEFAULT_RING_BYTES
    curve: Curve | None = None


class PeerLink:
    """The link from this prefill worker to one incarnation of one decode worker."""

    def __init__(
        self,
        context: zmq.Context[Any],
        peer: Peer,
        worker: str,
        connection: int,
        layout: KVLayout,
        counts: FrameCounts,
        options: LinkOptions,
    ) -> None:
        """`connection` differs for every link this process ever makes: an identity is never used twice. Raises
        ConfigError for an address that cannot be one."""
        self.peer = peer
        self.heard_at = time.monotonic()
        self.link, self.refusal = best_link(options.mode, options.host, options.device, peer)
        self.detail = str(self.refusal or "")
        self._options = options
        self.state = LinkState.CONNECTING if self.link else LinkState.REFUSED
        self.bytes_sent = 0
        self._worker = worker
        self._layout = layout
        self._window_bytes = 0
        self._bytes_consumed = 0
        self._credited_bytes = 0  # as the peer counts them
        self._moved_at = time.monotonic()  # when there was room in the window, or that number grew
        self._due_at = 0.0
        self._heard: deque[Gone | PeerHeartbeat] = deque()  # what is for the worker
        self._ring: RingWriter | DeviceRingWriter | None = None
        identity = f"{worker}/{connection}"
        self._bulk = Dealer(context, peer.bulk_address, identity, counts, options.curve, bulk=True)
        try:
            self._control = Dealer(context, peer.peer_address, identity, counts, options.curve)
        except ConfigError:
            self._bulk.close()
            raise
        if self.link == "shm":
            self._make_ring(options.ring_bytes)
        if self.link:
            self._bulk.send(self._hello())  # ahead of everything: large slabs of strangers are not taken

    def _make_ring(self, ring_bytes: int) -> None:
        try:
            self._ring = RingWriter(ring_bytes)
        except RingUnavailable as error:
            self._no_ring(str(error))

    def _no_ring(self, why: str) -> None:
        """Say aloud that no memory can be shared. Only before the first slab: a link never changes under way."""
        log.warning("no %s link to %s: %s", self.link, self.peer.worker, why)
        self.refusal = Refusal(self.link, "unavailable", why)
        self.detail = str(self.refusal)
        may_fall_back = self._options.mode == "auto" and "zmq" in self.peer.links
        self.link = "zmq" if may_fall_back else ""
        if not may_fall_back:
            self.state = LinkState.REFUSED

    def _hello(self) -> Hello:
        ring = self._ring.offer if isinstance(self._ring, RingWriter) else None
        return Hello(self._worker, self._layout, self.link, ring)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        return self._bulk.socket, self._control.socket

    @property
    def has_room(self) -> bool:
        """May new slabs be made for this peer? False while it has not consumed what is under way."""
        return self.state is LinkState.LINKED and self.bytes_sent - self._bytes_consumed < self._window_bytes

    @property
    def drained(self) -> bool:
        """Everything handed to this link has left for ZeroMQ."""
        return self._bulk.pending == 0

    @property
    def copied_out(self) -> bool:
        """No device reads the blocks any more that slabs were made of."""
        return not isinstance(self._ring, DeviceRingWriter) or self._ring.is_idle

    def settle(self) -> None:
        """Nothing is under way to this peer: what it has not acknowledged was lost, and shall not fill the window."""
        self._bytes_consumed = self.bytes_sent

    @property
    def slab_bytes(self) -> int:
        """From this size on a slab should leave. From a device each layer does at once, for nobody waits for it."""
        match self._ring:
            case RingWriter():
                return min(SLAB_BYTES, self._options.ring_bytes // RING_SHARE)
            case DeviceRingWriter():
                return 0
            case None:
                return FRAME_BYTES

    @property
    def ring_head(self) -> int:
        return self._ring.head if self._ring else 0

    def room_in_ring(self, num_bytes: int) -> tuple[RingSpan, memoryview | DeviceSpan] | None:
        """Memory of the ring for one slab; None without a ring, or while it has no room."""
        self._take_in()  # what the peer has just read is the best place: it is still in a cache
        if self._ring is None or (room := self._ring.allocate(num_bytes)) is None:
            return None
        place, memory = room
        return (place if isinstance(place, RingSpan) else RingSpan(place, num_bytes)), memory

    def send_slab(self, slab: Slab, payload: memoryview | DeviceSpan) -> None:
        """The payload goes along unless it lies in the ring."""
        if isinstance(payload, DeviceSpan):
            assert slab.span is not None
            assert isinstance(self._ring, DeviceRingWriter)
            self._ring.publish(slab.span)
            self._bulk.send(slab)
        else:
            self._bulk.send(slab, payload if slab.span is None else None)
        self.bytes_sent += payload.nbytes

    def send_bulk(self, message: Handoff | Abort) -> None:
        self._bulk.send(message)

    def poll(self) -> Iterator[Message]:
        """Take in credits and the answer to the hello; yields Gone and PeerHeartbeat for the worker."""
        self._take_in()
        while self._heard:
            yield self._heard.popleft()

    def _take_in(self) -> None:
        for received in self._control.receive():
            self.heard_at = time.monotonic()
            match received.message:
                case Credit() as credit:
                    self._credited(credit)
                case (Welcome() | HelloDenied()) if self.state is not LinkState.CONNECTING:
                    pass  # answers a hello that was repeated: a link never changes under way
                case Welcome() as welcome:
                    self._welcomed(welcome)
                case HelloDenied(reason=reason):
                    self.state, self.detail = LinkState.REFUSED, reason
                    log.error("decode worker %s refused the link: %s", self.peer.worker, reason)
                    self._close_ring()
                case Gone() | PeerHeartbeat() as message:
                    self._heard.append(message)

    def _credited(self, credit: Credit) -> None:
        if credit.consumed_bytes > self._credited_bytes:
            self._credited_bytes, self._moved_at = credit.consumed_bytes, time.monotonic()
        self._bytes_consumed = max(self._bytes_consumed, min(credit.consumed_bytes, self.bytes_sent))
        if self._ring is not None:
            self._ring.free_up_to(credit.ring_position)

    def _welcomed(self, welcome: Welcome) -> None:
        if welcome.link == "cuda_ipc":
            if self.link != "cuda_ipc":
                return  # answers the hello before the one that said zmq
            if welcome.ring is None or not self._open_ring(welcome.ring):
                self._due_at = 0.0  # say hello again, with the other link
                return
        elif self.link != welcome.link:
            self._close_ring()
            self._no_ring(welcome.detail)
            if self.state is LinkState.REFUSED:
                return
        self.state, self._window_bytes = LinkState.LINKED, welcome.window_bytes

    def _open_ring(self, offer: DeviceRingOffer) -> bool:
        """Open the memory that the peer has made for us, or fall back to what does without."""
        assert self._options.device is not None
        try:
            self._ring = DeviceRingWriter(self._options.device, offer)
        except RingUnavailable as error:
            self._no_ring(str(error))
            return False
        return True

    def tick(self, live: Iterable[tuple[str, int]]) -> None:
        """Send what is due: hellos until answered, then heartbeats listing the attempts under way to this peer."""
        now = time.monotonic()
        if self.has_room:
            self._moved_at = now
        elif self.state is LinkState.LINKED and now - self._moved_at > LOST_AFTER_S:
            log.warning("%s has not taken in what it was sent: it must have been lost on the way", self.peer.worker)
            self.settle()
        if now >= self._due_at:
            if self.state is LinkState.CONNECTING:
                self._due_at = now + HELLO_EVERY_S
                if self._control.pending == 0:
                    self._control.send(self._hello())
            elif self.state is LinkState.LINKED:
                self._due_at = now + PEER_HEARTBEAT_EVERY_S
                self._control.send(PeerHeartbeat(self._worker, list(live)))
        self._control.flush()
        self._bulk.flush()

    def report(self) -> Link:
        link = self.link if self.state is LinkState.LINKED else ""
        return Link(self.peer.worker, link, self.state.value, self.detail, self.bytes_sent)

    def close(self) -> None:
        self._bulk.close()
        self._control.close()
        self._close_ring()

    def _close_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None


@dataclass
class Outgoing:
    """What one attempt has sent."""

    request: str
    attempt: int
    reservation: int
    held_tokens: int  # decode has these already
    link: PeerLink
    layout: KVLayout
    next_token: int = field(init=False)  # the first that is not on its way, but for
    next_layer: int = 0  # the layers before this one, which have left for the tokens of the running step
    started_at: float | None = None

    def __post_init__(self) -> None:
        self.next_token = self.held_tokens

    def ship(self, store: KVStore, layer: int, blocks: Sequence[int], up_to: int) -> None:
        """This layer, as all before it, has the KV of tokens [:up_to]: copy what decode lacks out of the blocks and
        send it, as soon as it makes a slab of decent size, or with the last layer."""
        first, last = self.next_token, layer == self.layout.num_layers - 1
        if up_to <= first:
            return
        layers, count = range(self.next_layer, layer + 1), up_to - first
        num_bytes = count * self.layout.bytes_per_token_of(layers)
        if num_bytes < self.link.slab_bytes and not last:
            return
        self._send(store, layers, blocks, first, count, num_bytes)
        self.next_layer = 0 if last else layer + 1
        self.next_token = up_to if last else first
        if self.started_at is None:
            self.started_at = time.monotonic()

    def _send(
        self, store: KVStore, layers: range, blocks: Sequence[int], first: int, count: int, num_bytes: int
    ) -> None:
        span, memory = self.link.room_in_ring(num_bytes) or (None, None)
        payload: memoryview | DeviceSpan
        if isinstance(memory, DeviceSpan):
            store.gather_to(layers.start, blocks, first, count, memory)
            payload, digest = memory, 0
        else:
            payload, digest = store.gather(layers, blocks, first, count, memory)
        attempt = self.request, self.attempt, self.reservation
        self.link.send_slab(Slab(*attempt, layers.start, first, count, digest, span, len(layers)), payload)

    def hand_off(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        """Behind the last slab: decode owns the request from here."""
        elapsed_s = 0.0 if self.started_at is None else time.monotonic() - self.started_at
        head = self.link.ring_head
        handoff = Handoff(self.request, self.attempt, self.reservation, tokens, elapsed_s, head, logprobs)
        self.link.send_bulk(handoff)

    def abort(self, reason: str) -> None:
        """Tell decode that nothing more will come."""
        self.link.send_bulk(Abort(self.request, self.attempt, self.reservation, reason, self.link.ring_head))
