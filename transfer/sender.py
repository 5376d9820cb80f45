"""The sending end: one `PeerLink` per decode worker, one `Outgoing` per attempt that sends to it.

    PeerLink    CONNECTING ──Welcome──▶ LINKED            hello carries the KV layout; a mismatch is refused here
                     └──HelloDenied──▶ REFUSED            (kept, with its reason, until the peer's next incarnation)

Slab buffers are fresh for every slab and never reused, so ZeroMQ may read them whenever it gets to it. How much may be
under way is bounded by the window the receiver grants: bytes sent minus bytes it says it has consumed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import zmq

from .channel import Dealer, FrameCounts
from .errors import ConfigError
from .keys import Curve
from .layout import KVLayout
from .messages import (
    Abort,
    Credit,
    Gone,
    Handoff,
    Hello,
    HelloDenied,
    Link,
    Message,
    Peer,
    PeerHeartbeat,
    Slab,
    Welcome,
)
from .slab import KVStore, checksum

log = logging.getLogger(__name__)

HELLO_EVERY_S = 1.0
PEER_HEARTBEAT_EVERY_S = 0.5


class LinkState(Enum):
    CONNECTING = "connecting"
    LINKED = "linked"
    REFUSED = "refused"


class PeerLink:
    """The zmq link from this prefill worker to one incarnation of one decode worker."""

    def __init__(
        self,
        context: zmq.Context[Any],
        peer: Peer,
        worker: str,
        connection: int,
        layout: KVLayout,
        counts: FrameCounts,
        curve: Curve | None = None,
    ) -> None:
        """`connection` differs for every link this process ever makes: an identity is never used twice. Raises
        ConfigError for an address that cannot be one."""
        self.peer = peer
        self.heard_at = time.monotonic()
        self.state = LinkState.CONNECTING
        self.detail = ""
        self.bytes_sent = 0
        self._worker = worker
        self._layout = layout
        self._window_bytes = 0
        self._bytes_consumed = 0
        self._due_at = 0.0
        identity = f"{worker}/{connection}"
        self._bulk = Dealer(context, peer.bulk_address, identity, counts, curve, bulk=True)
        try:
            self._control = Dealer(context, peer.peer_address, identity, counts, curve)
        except ConfigError:
            self._bulk.close()
            raise
        self._bulk.send(Hello(worker, layout, "zmq"))  # ahead of everything: large slabs of strangers are not taken

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

    def settle(self) -> None:
        """Nothing is under way to this peer: what it has not acknowledged was lost, and shall not fill the window."""
        self._bytes_consumed = self.bytes_sent

    def send_bulk(self, message: Message, payload: memoryview | None = None) -> None:
        self._bulk.send(message, payload)
        if payload is not None:
            self.bytes_sent += payload.nbytes

    def poll(self) -> Iterator[Message]:
        """Take in credits and the answer to the hello; yields Gone and PeerHeartbeat for the worker."""
        for received in self._control.receive():
            self.heard_at = time.monotonic()
            match received.message:
                case Welcome(window_bytes=window_bytes):
                    self.state, self._window_bytes = LinkState.LINKED, window_bytes
                case HelloDenied(reason=reason):
                    self.state, self.detail = LinkState.REFUSED, reason
                    log.error("decode worker %s refused the link: %s", self.peer.worker, reason)
                case Credit(consumed_bytes=consumed):
                    self._bytes_consumed = max(self._bytes_consumed, min(consumed, self.bytes_sent))
                case Gone() | PeerHeartbeat() as message:
                    yield message

    def tick(self, live: Iterable[tuple[str, int]]) -> None:
        """Send what is due: hellos until answered, then heartbeats listing the attempts under way to this peer."""
        now = time.monotonic()
        if now >= self._due_at:
            if self.state is LinkState.CONNECTING:
                self._due_at = now + HELLO_EVERY_S
                if self._control.pending == 0:
                    self._control.send(Hello(self._worker, self._layout, "zmq"))
            elif self.state is LinkState.LINKED:
                self._due_at = now + PEER_HEARTBEAT_EVERY_S
                self._control.send(PeerHeartbeat(self._worker, list(live)))
        self._control.flush()
        self._bulk.flush()

    def report(self) -> Link:
        link = "zmq" if self.state is LinkState.LINKED else ""
        return Link(self.peer.worker, link, self.state.value, self.detail, self.bytes_sent)

    def close(self) -> None:
        self._bulk.close()
        self._control.close()


@dataclass
class Outgoing:
    """What one attempt has sent. `next_token[layer]` is the first prompt token not yet on its way."""

    request: str
    attempt: int
    reservation: int
    held_tokens: int  # decode has these already
    link: PeerLink
    num_layers: int
    next_token: list[int] = field(init=False)
    started_at: float | None = None

    def __post_init__(self) -> None:
        self.next_token = [self.held_tokens] * self.num_layers

    def ship(self, store: KVStore, layer: int, blocks: Sequence[int], up_to: int) -> None:
        """Copy what decode lacks of this layer's tokens [:up_to] out of the blocks and send it."""
        first = self.next_token[layer]
        if up_to <= first:
            return
        payload = store.gather(layer, blocks, first, up_to - first)
        slab = Slab(self.request, self.attempt, self.reservation, layer, first, up_to - first, checksum(payload))
        self.link.send_bulk(slab, payload)
        self.next_token[layer] = up_to
        if self.started_at is None:
            self.started_at = time.monotonic()

    def hand_off(self, tokens: list[int]) -> None:
        """Behind the last slab: decode owns the request from here."""
        elapsed_s = 0.0 if self.started_at is None else time.monotonic() - self.started_at
        handoff = Handoff(self.request, self.attempt, self.reservation, tokens, elapsed_s)
        self.link.send_bulk(handoff)

    def abort(self, reason: str) -> None:
        """Tell decode that nothing more will come."""
        self.link.send_bulk(Abort(self.request, self.attempt, self.reservation, reason))
