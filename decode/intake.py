"""The door for slabs: the two sockets that prefill workers connect to, hellos, credits, and who gets told "gone"."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import zmq

from ..transfer.channel import FrameCounts, Received, Router
from ..transfer.errors import LayoutMismatch
from ..transfer.keys import Curve
from ..transfer.layout import KVLayout
from ..transfer.messages import Abort, Credit, Gone, Handoff, Hello, HelloDenied, PeerHeartbeat, Slab, Welcome

log = logging.getLogger(__name__)

WINDOW_BYTES = 256 * 1024 * 1024
MAX_PEERS = 4096
CONTROL_PER_POLL = 200  # messages; polled between the layers of a step, which a flood must not stretch
UNWANTED_PER_POLL = 32
MIN_COST_BYTES = 4096  # of the budget, for every message: one without a payload costs time as well
SILENT_S = 2.0  # a peer that says nothing for so long may come back under another identity


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
    ) -> None:
        self._layout = layout
        self._counts = counts
        self._bulk = Router(context, bulk_address, counts, curve, bulk=True)
        self._control = Router(context, peer_address, counts, curve)
        self._consumed: dict[str, int] = {}  # identity → payload bytes taken in or dropped, in all
        self._credited: dict[str, int] = {}
        self._heard_at: dict[str, float] = {}
        self._bulk_here: set[str] = set()  # identities whose bulk socket has said hello
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
                        self._control.blame(received)
                        continue
                    self._control.trust(received)
                    self._heard_at[received.sender] = time.monotonic()
                    yield received.sender, heartbeat
                case other:
                    self._counts.drop("unexpected")
                    self._control.blame(received)
                    log.debug("unexpected %s from %s", other.kind, received.sender)

    def _greet(self, received: Received, hello: Hello, worker: str) -> None:
        """Let a prefill worker in, once both of its sockets are here."""
        identity = received.sender
        full = identity not in self._consumed and len(self._consumed) >= MAX_PEERS
        if worker_of(identity) != hello.worker or full or self._is_taken(identity, worker):
            self._counts.drop("identity")
            self._control.blame(received)
            return
        try:
            self._layout.require_equal(hello.layout, worker, hello.worker)
        except LayoutMismatch as error:
            self._control.send(identity, HelloDenied(str(error)))
            self._control.blame(received)
            return
        if identity not in self._bulk_here:
            if len(self._early) < MAX_PEERS:
                self._early[identity] = received, hello, worker
            return
        self._control.trust(received)
        self._heard_at[identity] = time.monotonic()
        self._consumed.setdefault(identity, 0)
        self._credited[identity] = self._consumed[identity]
        self._control.send(identity, Welcome(worker, WINDOW_BYTES))

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
            self._bulk_here &= self._consumed.keys()
        self._bulk_here.add(received.sender)
        self._bulk.blame(received)  # it is said once; whoever goes on saying it is a flood
        if (early := self._early.pop(received.sender, None)) is not None:
            self._greet(*early)
        if received.sender in self._consumed:
            self._bulk.trust(received)

    def poll_bulk(self, budget_bytes: int) -> Iterator[Received]:
        """Slabs, handoffs and aborts, in order, until about `budget_bytes` of payload have been taken in."""
        unwanted = 0
        while budget_bytes > 0 and unwanted < UNWANTED_PER_POLL:
            received = next(iter(self._bulk.receive(limit=64)), None)
            if received is None:
                return
            size = received.payload.nbytes if received.payload is not None else 0
            budget_bytes -= max(size, MIN_COST_BYTES)
            if isinstance(received.message, Hello):
                unwanted += 1
                self._bulk_hello(received)
                continue
            if received.sender not in self._consumed:
                unwanted += 1
                self._counts.drop("stranger")
                self._bulk.blame(received)
                continue
            self._bulk.trust(received)
            self._consumed[received.sender] += size
            if isinstance(received.message, Slab | Handoff | Abort):
                yield received
            else:
                self._counts.drop("unexpected")

    def tell_gone(self, identity: str, request: str, attempt: int) -> None:
        """Make the sender of something unwanted stop; once per attempt and turn."""
        if (identity, request, attempt) not in self._told_gone:
            self._told_gone.add((identity, request, attempt))
            self._control.send(identity, Gone(request, attempt))

    def heartbeat(self, identity: str, worker: str, live: list[tuple[str, int]]) -> None:
        self._control.send(identity, PeerHeartbeat(worker, live))

    def send_credits(self) -> None:
        """Tell every sender how much has been consumed since the last time; forget senders that are gone."""
        self._told_gone.clear()
        for identity, consumed in list(self._consumed.items()):
            if consumed == self._credited[identity]:
                continue
            if self._control.send(identity, Credit(consumed)):
                self._credited[identity] = consumed
            else:
                del self._consumed[identity], self._credited[identity], self._heard_at[identity]
                self._bulk_here.discard(identity)

    def close(self) -> None:
        self._bulk.close()
        self._control.close()
