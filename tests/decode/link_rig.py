"""Both ends of a link in one process, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import zmq

from pdserve.decode.intake import Intake, worker_of
from pdserve.engine.kv_cache import KVCache
from pdserve.transfer.channel import FrameCounts
from pdserve.transfer.layout import KVLayout, LayerShape
from pdserve.transfer.links import LinkMode, offered
from pdserve.transfer.messages import Abort, Handoff, Peer, Slab
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import LinkOptions, LinkState, Outgoing, PeerLink
from pdserve.transfer.slab import store_slab

NUM_LAYERS, TOKENS = 6, 100
LAYOUT = KVLayout("f", "float32", (LayerShape(2, 16, 16),) * (NUM_LAYERS - 1) + (LayerShape(1, 7, 3),))
LAYER_BYTES = TOKENS * 2 * 2 * 16 * 4
PREFILL, DECODE = "prefill-0#00000001", "decode-0#00000002"
TABLE = [4, 0, 6, 2, 1, 5, 3]


def random_cache(seed: int) -> KVCache:
    cache = KVCache(LAYOUT, 7, 16)
    generator = torch.Generator().manual_seed(seed)
    for plane in (*cache.keys, *cache.values):
        plane.normal_(generator=generator)
    return cache


@dataclass
class Pair:
    intake: Intake
    link: PeerLink
    counts: FrameCounts

    def connect_again(self, connection: int, options: LinkOptions) -> None:
        """Close the link and make another one, as a prefill worker does that has not heard anything for long."""
        self.link.close()
        context = self.intake.sockets[0].context
        self.link = PeerLink(context, self.link.peer, PREFILL, connection, LAYOUT, FrameCounts(), options)

    def turn(self) -> None:
        for _ in self.intake.poll_control(DECODE):
            pass
        for _ in self.link.poll():
            pass
        self.link.tick([])

    def is_linked(self) -> bool:
        return not [*self.intake.poll_bulk(1)] and self.link.state is LinkState.LINKED

    def until(self, condition: Callable[[], bool], what: str, within_s: float = 10) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, what
            self.turn()
            self.intake.sockets[0].poll(5)

    def hear(self, first: str) -> None:
        """Decode hears the hello on that socket before the one on the other."""
        socket = dict(zip(("bulk", "control"), self.intake.sockets, strict=True))[first]
        deadline = time.monotonic() + 10
        while not socket.poll(5):
            assert time.monotonic() < deadline, "the hello is here"
            self.link.tick([])
        assert not [*(self.intake.poll_bulk(1) if first == "bulk" else self.intake.poll_control(DECODE))]

    def take(self) -> list[Slab | Handoff | Abort]:
        """Everything up to the handoff, into a cache like the sender's; then the credit for it."""
        receiver, cache = Receiver(LAYOUT), random_cache(2)
        receiver.expect("r", 1, 9, PREFILL, 0, TOKENS)
        taken: list[Slab | Handoff | Abort] = []

        def look() -> bool:
            self.intake.send_credits()
            for received in self.intake.poll_bulk(1 << 30):
                message = received.message
                assert isinstance(message, Slab | Handoff)
                entry = receiver.find(message, worker_of(received.sender))
                assert entry is not None
                taken.append(message)
                if isinstance(message, Slab):
                    assert isinstance(received.payload, memoryview)
                    receiver.check(entry, message, received.payload)
                    store_slab(cache, message, TABLE, received.payload)
                    receiver.taken(entry, message, received.payload.nbytes)
                else:
                    receiver.complete(entry)
            return bool(taken) and isinstance(taken[-1], Handoff)

        self.until(look, "the handoff is here")
        layers = range(NUM_LAYERS)
        assert bytes(cache.gather(layers, TABLE, 0, TOKENS)[0]) == bytes(
            random_cache(1).gather(layers, TABLE, 0, TOKENS)[0]
        )
        return taken


@contextmanager
def two_ends(directory: Path, mode: LinkMode, ring_bytes: int, theirs: LinkMode | None = None) -> Iterator[Pair]:
    """Not linked yet. `theirs`: what decode offers, if that is not the same."""
    with zmq.Context() as context:
        counts = FrameCounts()
        intake = Intake(context, f"ipc://{directory}/b", f"ipc://{directory}/c", LAYOUT, counts, mode=theirs or mode)
        options = LinkOptions(mode, "here", ring_bytes=ring_bytes)
        peer = Peer(DECODE, "here", *intake.addresses, offered(theirs or mode, False))
        link = PeerLink(context, peer, PREFILL, 1, LAYOUT, FrameCounts(), options)
        both = Pair(intake, link, counts)
        try:
            yield both
            assert not counts.dropped
        finally:
            both.link.close()
            intake.close()


@contextmanager
def pair(directory: Path, mode: LinkMode, ring_bytes: int, first: str = "") -> Iterator[Pair]:
    """Linked. `first`: the socket whose hello is heard first."""
    with two_ends(directory, mode, ring_bytes) as both:
        if first:
            both.hear(first)
        both.until(both.is_linked, "the two are linked")
        yield both


def ship(link: PeerLink, *chunks: int) -> None:
    """A prompt in chunks that end there, layer after layer."""
    outgoing, cache = Outgoing("r", 1, 9, 0, link, LAYOUT), random_cache(1)
    for up_to in chunks:
        for layer in range(NUM_LAYERS):
            outgoing.ship(cache, layer, TABLE, up_to)
    outgoing.hand_off([5], [])
