"""The links from this prefill worker to the decode workers the gateways have told it of."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import zmq

from ..transfer.channel import FrameCounts
from ..transfer.errors import ConfigError
from ..transfer.layout import KVLayout
from ..transfer.messages import Message, Peer
from ..transfer.reports import Link
from ..transfer.sender import LinkOptions, LinkState, PeerLink

log = logging.getLogger(__name__)

Key = tuple[str, int]


class Peers:
    """One `PeerLink` per decode worker incarnation. `on_lost(link)` is told of every link that is given up."""

    def __init__(
        self,
        context: zmq.Context[Any],
        layout: KVLayout,
        counts: FrameCounts,
        death_bound_s: float,
        on_lost: Callable[[PeerLink], None],
        options: LinkOptions,
    ) -> None:
        self._context = context
        self._layout = layout
        self._counts = counts
        self._death_bound_s = death_bound_s
        self._on_lost = on_lost
        self._options = options
        self._connections = itertools.count(1)
        self._known: dict[int, list[Peer]] = {}  # by gateway (its place in our list)
        self._links: dict[str, PeerLink] = {}

    def __iter__(self) -> Iterator[PeerLink]:
        return iter(list(self._links.values()))

    def get(self, worker: str) -> PeerLink | None:
        return self._links.get(worker)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [socket for link in self._links.values() for socket in link.sockets]

    def update(self, gateway: int, peers: list[Peer], worker: str) -> None:
        """One gateway's list of decode workers has changed: connect to new ones, give up those nobody lists."""
        self._known[gateway] = peers
        wanted = {peer.worker: peer for listed in self._known.values() for peer in listed}
        for gone in self._links.keys() - wanted.keys():
            self._give_up(gone, "it has left")
        for name, peer in wanted.items():
            if name not in self._links:
                self._connect(peer, worker)

    def forget_gateway(self, gateway: int, worker: str) -> None:
        """A gateway is gone. Keep its peers until it is back, or some other gateway tells better."""
        if len(self._known) > 1:
            self.update(gateway, [], worker)

    def reconnect_all(self, worker: str) -> None:
        """This worker has a new incarnation: every link starts over under the new identity."""
        for name in list(self._links):
            peer = self._links[name].peer
            self._give_up(name, "this worker was away")
            self._connect(peer, worker)

    def _connect(self, peer: Peer, worker: str) -> None:
        try:
            self._links[peer.worker] = PeerLink(
                self._context, peer, worker, next(self._connections), self._layout, self._counts, self._options
            )
        except ConfigError as error:  # as good as a decode worker that does not answer
            log.error("no link to %s: %s", peer.worker, error)

    def _give_up(self, name: str, why: str) -> None:
        link = self._links.pop(name)
        log.info("link to %s closed: %s", name, why)
        self._on_lost(link)
        link.close()

    def poll(self, worker: str) -> Iterator[tuple[PeerLink, Message]]:
        """What decode workers have said; a linked one that is silent for the death bound is connected to afresh."""
        now = time.monotonic()
        for link in self:
            for message in link.poll():
                yield link, message
            if link.state is LinkState.LINKED and now - link.heard_at > self._death_bound_s:
                self._give_up(link.peer.worker, "silent")
                self._connect(link.peer, worker)

    def tick(self, live_of: Callable[[PeerLink], Iterable[Key]]) -> None:
        for link in self:
            live = list(live_of(link))
            if not live and link.drained:
                link.settle()
            link.tick(live)

    def report(self) -> list[Link]:
        return [link.report() for link in self]

    def close(self) -> None:
        for link in self:
            link.close()
