"""The door for slabs: the two sockets that prefill workers connect to, hellos, credits, and who gets told "gone"."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import zmq

from ..transfer.channel import FrameCounts, Received, Router
from ..transfer.errors import LayoutMismatch
from ..transfer.layout import KVLayout
from ..transfer.messages import Abort, Credit, Gone, Handoff, Hello, HelloDenied, PeerHeartbeat, Slab, Welcome

log = logging.getLogger(__name__)

WINDOW_BYTES = 256 * 1024 * 1024
MAX_PEERS = 4096


def worker_of(identity: str) -> str:
    """Identities are "<worker id>/<connection number>"."""
    return identity.rpartition("/")[0]


class Intake:
    """Bulk and control sockets of one decode worker."""

    def __init__(
        self, context: zmq.Context[Any], bulk_address: str, peer_address: str, layout: KVLayout, counts: FrameCounts
    ) -> None:
        self._layout = layout
        self._counts = counts
        self._bulk = Router(context, bulk_address, counts, bulk=True)
        self._control = Router(context, peer_address, counts)
        self._consumed: dict[str, int] = {}  # identity → payload bytes taken in or dropped, in all
        self._credited: dict[str, int] = {}
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
        for received in self._control.receive():
            match received.message:
                case Hello() as hello:
                    self._greet(received.sender, hello, worker)
                case PeerHeartbeat() as heartbeat:
                    yield received.sender, heartbeat
                case other:
                    self._counts.drop("unexpected")
                    log.debug("unexpected %s from %s", other.kind, received.sender)

    def _greet(self, identity: str, hello: Hello, worker: str) -> None:
        if worker_of(identity) != hello.worker or (identity not in self._consumed and len(self._consumed) >= MAX_PEERS):
            self._counts.drop("identity")
            return
        try:
            self._layout.require_equal(hello.layout, worker, hello.worker)
        except LayoutMismatch as error:
            self._control.send(identity, HelloDenied(str(error)))
            return
        self._consumed.setdefault(identity, 0)
        self._credited[identity] = self._consumed[identity]
        self._control.send(identity, Welcome(worker, WINDOW_BYTES))

    def poll_bulk(self, budget_bytes: int) -> Iterator[Received]:
        """Slabs, handoffs and aborts, in order, until about `budget_bytes` of payload have been taken in."""
        while budget_bytes > 0:
            received = next(iter(self._bulk.receive(limit=64)), None)
            if received is None:
                return
            size = received.payload.nbytes if received.payload is not None else 0
            budget_bytes -= size
            if received.sender not in self._consumed:
                self._counts.drop("stranger")
                continue
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
                del self._consumed[identity], self._credited[identity]

    def close(self) -> None:
        self._bulk.close()
        self._control.close()
