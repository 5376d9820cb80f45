"""A link of shared memory under what it was not made for: ends that stall, lie, die, or have no memory to share."""

from __future__ import annotations

import errno
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import zmq

from pdserve.decode import intake as intake_module
from pdserve.decode.intake import Intake, worker_of
from pdserve.engine.kv_cache import KVCache
from pdserve.transfer import sender as sender_module
from pdserve.transfer.channel import FrameCounts
from pdserve.transfer.messages import Credit, Gone, Handoff, HelloDenied, Message, Peer, Slab, Welcome
from pdserve.transfer.offers import RingSpan
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.ring import RingReader, RingWriter
from pdserve.transfer.sender import LOST_AFTER_S, LinkOptions, LinkState, Outgoing, PeerLink
from pdserve.transfer.slab import store_slab
from tests.decode.link_rig import (
    DECODE,
    LAYER_BYTES,
    LAYOUT,
    NUM_LAYERS,
    PREFILL,
    TABLE,
    TOKENS,
    Pair,
    pair,
    random_cache,
    ship,
    two_ends,
)

RING_BYTES = 4 * LAYER_BYTES


def ring_is_free(both: Pair, ring_bytes: int) -> bool:
    """All of it. Takes it, so the link is of no further use."""
    return both.link.room_in_ring(ring_bytes) is not None


def descriptors() -> int:
    """Of rings, open in this process."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum("pdserve-ring" in os.readlink(link) for link in links if os.path.islink(link))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("pdserve-ring")


ALIVE = ["start", "chunk", "chunk", "chunk", "turn", "forget", "drop"]


class Decode:
    """The receiving end of several attempts, whose blocks lie one after the other."""

    def __init__(self, both: Pair) -> None:
        self._both = both
        self._receiver = Receiver(LAYOUT)
        self._tables: dict[str, list[int]] = {}
        self.cache = KVCache(LAYOUT, 7 * 64, 16)
        self.whole: dict[str, list[int]] = {}

    def expect(self, name: str) -> None:
        first = 7 * len(self._tables)
        self._tables[name] = [first + block for block in TABLE]
        self._receiver.expect(name, 1, 9, PREFILL, 0, TOKENS)

    def unfinished(self) -> set[str]:
        return self._tables.keys() - self.whole.keys()

    def forget(self, name: str) -> None:
        self._receiver.forget(name, 1)

    def take(self, budget_bytes: int) -> None:
        for received in self._both.intake.poll_bulk(budget_bytes):
            message = received.message
            assert isinstance(message, Slab | Handoff)
            entry = self._receiver.find(message, worker_of(received.sender))
            if entry is None:
                self._both.intake.tell_gone(received.sender, message.request, message.attempt)
            elif isinstance(message, Slab):
                assert isinstance(received.payload, memoryview)
                self._receiver.check(entry, message, received.payload)
                store_slab(self.cache, message, self._tables[message.request], received.payload)
                self._receiver.taken(entry, message, received.payload.nbytes)
            else:
                self._receiver.complete(entry)
                self.whole[message.request] = self._tables[message.request]
        self._both.intake.send_credits()


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_chunks_cancels_deaths_and_turns_leaves_whole_prompts_and_a_free_ring(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "WINDOW_BYTES", 1)  # so there is room only if all was acknowledged
    dice = random.Random(seed)
    ring_bytes = dice.choice([LAYER_BYTES // 3, LAYER_BYTES + 64, RING_BYTES, 9 * LAYER_BYTES + 4096])
    with pair(tmp_path, "shm", ring_bytes) as both:
        decode, cache = Decode(both), random_cache(1)
        outgoing: dict[str, tuple[Outgoing, int]] = {}  # and the tokens that are computed
        cancelled: set[str] = set()
        names, connections = (f"r{number}" for number in itertools.count()), itertools.count(2)

        def is_linked() -> bool:
            decode.take(1 << 30)
            return both.link.state is LinkState.LINKED

        def step() -> None:
            match dice.choice([*ALIVE, "die"] if dice.random() < 0.2 else ALIVE):
                case "start" if len(outgoing) < 5:
                    name = next(names)
                    decode.expect(name)
                    outgoing[name] = Outgoing(name, 1, 9, 0, both.link, LAYOUT), 0
                case "chunk" if outgoing:
                    name = dice.choice(list(outgoing))
                    attempt, done = outgoing.pop(name)
                    up_to = min(TOKENS, done + dice.randint(1, TOKENS))
                    for layer in range(NUM_LAYERS):
                        attempt.ship(cache, layer, TABLE, up_to)
                    if up_to < TOKENS:
                        outgoing[name] = attempt, up_to
                    else:
                        attempt.hand_off([5], [])
                case "forget" if outgoing:
                    cancelled.add(name := dice.choice(list(outgoing)))
                    decode.forget(name)
                case "drop" if outgoing:
                    cancelled.add(name := dice.choice(list(outgoing)))
                    del outgoing[name]
                case "die":
                    decode.take(dice.choice([1, LAYER_BYTES]))
                    for name in decode.unfinished():
                        cancelled.add(name)
                        decode.forget(name)
                    outgoing.clear()
                    both.connect_again(next(connections), LinkOptions("shm", "here", ring_bytes=ring_bytes))
                    both.until(is_linked, "the next life is let in")
                case "turn":
                    decode.take(dice.choice([1, LAYER_BYTES, 1 << 30]))
                    for message in both.link.poll():
                        assert isinstance(message, Gone)
                        assert message.request in cancelled
                        outgoing.pop(message.request, None)

        for _ in range(60):
            step()
        for attempt, done in outgoing.values():
            for layer in range(NUM_LAYERS if done < TOKENS else 0):
                attempt.ship(cache, layer, TABLE, TOKENS)
            attempt.hand_off([5], [])
        started = {f"r{number}" for number in range(int(next(names)[1:]))}

        def all_done() -> bool:
            decode.take(1 << 30)
            return decode.whole.keys() >= started - cancelled and both.link.has_room

        both.until(all_done, "everything moves on when decode does")
        expected = bytes(cache.gather(range(NUM_LAYERS), TABLE, 0, TOKENS)[0])
        for table in decode.whole.values():
            assert bytes(decode.cache.gather(range(NUM_LAYERS), table, 0, TOKENS)[0]) == expected
        assert ring_is_free(both, ring_bytes // 64 * 64)
        del both.counts.dropped["stranger"]  # what a dead one had sent
        del both.counts.dropped["identity"]  # a hello while the one before was not seen to be dead


def test_a_reader_that_stalls_with_a_ring_in_pieces_gets_the_rest_beside_it_and_then_all_is_free(
    tmp_path: Path,
) -> None:
    with pair(tmp_path, "shm", RING_BYTES) as both:
        decode = Decode(both)
        for number in range(9):
            decode.expect(f"r{number}")
            outgoing = Outgoing(f"r{number}", 1, 9, 0, both.link, LAYOUT)
            for up_to in (1 + 7 * number, 60, TOKENS):
                for layer in range(NUM_LAYERS):
                    outgoing.ship(random_cache(1), layer, TABLE, up_to)
            outgoing.hand_off([5], [])
            if number == 4:
                both.until(lambda: decode.take(LAYER_BYTES) is None and bool(decode.whole), "some of it is read")

        def all_here() -> bool:
            decode.take(1 << 30)
            return len(decode.whole) == 9

        both.until(all_here, "all of it is here")
        both.until(lambda: ring_is_free(both, RING_BYTES), "the ring is whole again")


@pytest.mark.parametrize("ring_bytes", [64, 100, 4096, LAYER_BYTES - 64])
def test_a_ring_that_holds_no_layer_is_passed_by(tmp_path: Path, ring_bytes: int) -> None:
    with pair(tmp_path, "shm", ring_bytes) as both:
        ship(both.link, 30, TOKENS)
        slabs = [message for message in both.take() if isinstance(message, Slab)]
        assert any(slab.span is None for slab in slabs)
        assert all(slab.span.num_bytes <= ring_bytes for slab in slabs if slab.span is not None)


def say(both: Pair, answer: Message) -> None:
    """Decode says this, whatever the truth is, and it is heard."""
    assert both.intake._control.send(f"{PREFILL}/1", answer)
    assert both.link.sockets[1].poll(10_000), "it is here"
    assert [*both.link.poll()] == []


def test_credits_late_twice_or_for_what_was_never_sent_free_nothing_twice(tmp_path: Path) -> None:
    with pair(tmp_path, "shm", RING_BYTES) as both:
        rooms = [both.link.room_in_ring(LAYER_BYTES) for _ in range(4)]
        ends = [room[0].position + LAYER_BYTES for room in rooms if room is not None]
        assert len(ends) == 4
        assert both.link.room_in_ring(1) is None
        say(both, Credit(1 << 60, 1 << 60))
        assert both.link.room_in_ring(1) is None, "nothing was ever written there"
        say(both, Credit(0, ends[1]))
        say(both, Credit(0, ends[0]))
        say(both, Credit(0, ends[1]))
        again = both.link.room_in_ring(2 * LAYER_BYTES)
        assert again is not None
        say(both, Credit(0, ends[1]))
        assert both.link.room_in_ring(1) is None, "the places that were free are given out again"
        say(both, Credit(0, again[0].position + 2 * LAYER_BYTES))
        assert both.link.room_in_ring(4 * LAYER_BYTES) is not None


class Clock:
    """What the sender takes for the time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sender_module, "time", clock)
    return clock


def test_what_was_lost_on_the_way_fills_neither_window_nor_ring_for_ever(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode hears of less than was sent, and prompts go on being under way, so the link is never idle."""
    monkeypatch.setattr(intake_module, "WINDOW_BYTES", LAYER_BYTES)
    with pair(tmp_path, "shm", RING_BYTES) as both:
        both.link.tick([])
        for _ in range(4):
            room = both.link.room_in_ring(LAYER_BYTES)
            assert room is not None
            lost = memoryview(bytes(LAYER_BYTES))
            both.link.send_slab(Slab("lost", 1, 9, 0, 0, 1, 0, RingSpan(0, 1)), lost)
        heard = 0

        def turn() -> bool:
            nonlocal heard
            heard += len([*both.intake.poll_bulk(1 << 30)])
            both.intake.send_credits()
            return heard == 4 and both.link.sockets[1].poll(0) == 0

        both.until(turn, "decode has told what it has heard of")
        clock.now += LOST_AFTER_S
        both.link.tick([("r", 1)])
        assert not both.link.has_room
        clock.now += 0.1
        both.link.tick([("r", 1)])
        assert both.link.has_room
        assert both.link.room_in_ring(1) is None
        ship(both.link, TOKENS)
        both.take()
        both.intake.send_credits()
        both.until(lambda: ring_is_free(both, RING_BYTES), "a handoff speaks for all that was sent before it")


def test_a_slow_peer_whose_credits_come_is_not_taken_for_deaf(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if it once was."""
    monkeypatch.setattr(intake_module, "WINDOW_BYTES", 4)
    with pair(tmp_path, "shm", RING_BYTES) as both:
        both.link.tick([])
        both.link.send_slab(Slab("r", 1, 9, 0, 0, 1, 0, RingSpan(0, 4)), memoryview(bytes(4)))
        clock.now += LOST_AFTER_S + 0.1
        both.link.tick([("r", 1)])
        assert both.link.has_room, "nothing came"
        both.link.send_slab(Slab("r", 1, 9, 0, 0, 1, 0, RingSpan(0, 4)), memoryview(bytes(4)))
        for consumed_bytes in range(1, 5):
            clock.now += LOST_AFTER_S - 0.1
            say(both, Credit(consumed_bytes, 0))
            both.link.tick([("r", 1)])
            assert not both.link.has_room
        say(both, Credit(5, 0))
        assert both.link.has_room
        both.until(lambda: len([*both.intake.poll_bulk(1 << 30)]) > 0, "they are here")


def test_every_peer_of_many_is_served_and_no_turn_takes_more_than_its_budget_and_a_slab(tmp_path: Path) -> None:
    slab_bytes, num_peers, num_slabs = 1 << 20, 5, 4
    with zmq.Context() as context:
        counts = FrameCounts()
        intake = Intake(context, f"ipc://{tmp_path}/b", f"ipc://{tmp_path}/c", LAYOUT, counts, mode="shm")
        peer = Peer(DECODE, "here", *intake.addresses, ["shm"])
        links = [
            PeerLink(context, peer, f"prefill-{n}#0000000{n}", 1, LAYOUT, FrameCounts(), LinkOptions("shm", "here"))
            for n in range(num_peers)
        ]
        rig = Pair(intake, links[0], counts)

        def all_linked() -> bool:
            for link in links[1:]:
                link.tick([])
                assert not [*link.poll()]
            return not [*intake.poll_bulk(1)] and all(link.state is LinkState.LINKED for link in links)

        rig.until(all_linked, "all are linked")
        for link in links:
            for _ in range(num_slabs):
                room = link.room_in_ring(slab_bytes)
                assert room is not None
                link.send_slab(Slab("r", 1, 9, 0, 0, 1, 0, room[0]), room[1])
        budget, taken = 2 * slab_bytes, dict.fromkeys(range(num_peers), 0)

        def turn() -> bool:
            sizes = []
            for received in intake.poll_bulk(budget):
                assert received.payload is not None
                sizes.append(received.payload.nbytes)
                taken[int(received.sender[8])] += 1
            assert sum(sizes) < budget + slab_bytes
            return sum(taken.values()) == num_peers * num_slabs

        rig.until(turn, "all of it is here")
        assert set(taken.values()) == {num_slabs}
        intake.send_credits()
        for link in links:
            link.close()
        intake.close()


# --- memory that cannot be had ---------------------------------------------------------------------------------


def refusing(code: int) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize(("call", "code"), [("memfd_create", errno.ENOSYS), ("posix_fallocate", errno.ENOSPC)])
def test_without_memory_kv_goes_through_sockets_and_that_is_said(
    tmp_path: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = descriptors()
    monkeypatch.setattr(os, call, refusing(code))
    with two_ends(tmp_path, "auto", RING_BYTES) as both:
        both.until(both.is_linked, "the two are linked")
        assert both.link.report().link == "zmq"
        assert os.strerror(code) in both.link.report().detail
        assert os.strerror(code) in caplog.text
        ship(both.link, TOKENS)
        assert all(slab.span is None for slab in both.take() if isinstance(slab, Slab))
        assert descriptors() == before


def test_where_only_shared_memory_is_wanted_a_link_without_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))
    with two_ends(tmp_path, "shm", RING_BYTES) as both:
        assert both.link.state is LinkState.REFUSED
        assert os.strerror(errno.ENOSPC) in both.link.report().detail


def test_a_ring_that_decode_cannot_map_is_given_back_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = descriptors()
    with two_ends(tmp_path, "auto", RING_BYTES) as both:
        assert descriptors() > before
        monkeypatch.setattr(os, "open", refusing(errno.EACCES))
        both.until(both.is_linked, "the two are linked")
        monkeypatch.undo()
        assert both.link.report().link == "zmq"
        assert os.strerror(errno.EACCES) in both.link.report().detail
        assert os.strerror(errno.EACCES) in caplog.text
        assert descriptors() == before
        ship(both.link, TOKENS)
        both.take()


def test_a_link_that_is_denied_keeps_no_memory_and_stays_so(tmp_path: Path) -> None:
    before = descriptors()
    with two_ends(tmp_path, "shm", RING_BYTES) as both:
        both.hear("control")
        assert descriptors() > before
        say(both, HelloDenied("not you"))
        assert both.link.state is LinkState.REFUSED
        assert descriptors() == before
        both.hear("bulk")  # decode welcomes it, after all
        assert both.link.sockets[1].poll(10_000), "the answer is here"
        assert [*both.link.poll()] == []
        assert (both.link.state, both.link.report().detail) == (LinkState.REFUSED, "not you")


@pytest.mark.parametrize(
    "late", [Welcome(DECODE, 1, "zmq", "out of reach", None), Welcome(DECODE, 1, "shm", "", None), HelloDenied("no")]
)
def test_a_late_answer_to_a_repeated_hello_changes_no_link_under_way(
    tmp_path: Path, late: Welcome | HelloDenied
) -> None:
    with pair(tmp_path, "shm", 1 << 20) as both:
        say(both, late)
        assert both.link.report().link == "shm"
        ship(both.link, TOKENS)
        assert all(slab.span is not None for slab in both.take() if isinstance(slab, Slab))


# --- an end that is killed -------------------------------------------------------------------------------------

SENDER = """
import sys, zmq
from pdserve.transfer.channel import FrameCounts
from pdserve.transfer.layout import KVLayout, LayerShape
from pdserve.transfer.messages import Peer, Slab
from pdserve.transfer.sender import LOST_AFTER_S, LinkOptions, LinkState, PeerLink
layout = KVLayout("f", "float32", (LayerShape(2, 16, 16),) * 5 + (LayerShape(1, 7, 3),))
peer = Peer(sys.argv[1], "here", sys.argv[2], sys.argv[3], ["shm"])
link = PeerLink(zmq.Context(), peer, sys.argv[4], 1, layout, FrameCounts(), LinkOptions("shm", "here"))
while link.state is not LinkState.LINKED:
    link.tick([])
    link.sockets[1].poll(50)
    assert not [*link.poll()]
for number in range(3):
    place, memory = link.room_in_ring(1000)
    memory[:] = bytes([number]) * 1000
    link.send_slab(Slab("r", 1, 9, 0, 0, 1, 0, place), memory)
sys.stdin.read()
"""


def test_memory_of_a_killed_sender_can_be_read_on_and_then_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "SILENT_S", 0.1)
    with pair(tmp_path, "shm", RING_BYTES) as both:
        before, payloads = mappings(), list[memoryview]()

        def all_here() -> bool:
            for received in both.intake.poll_bulk(1 << 30):
                assert isinstance(received.payload, memoryview)
                payloads.append(received.payload)
            return len(payloads) == 3

        command = [sys.executable, "-c", SENDER, DECODE, *both.intake.addresses, "prefill-1#00000003"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            both.until(all_here, "its slabs are here", within_s=60)
        finally:
            child.kill()
            child.communicate(timeout=10)
        assert [bytes(payload) for payload in payloads] == [bytes([number]) * 1000 for number in range(3)]
        payloads.clear()

        def is_gone() -> bool:
            both.intake.send_credits()
            return mappings() == before

        both.until(is_gone, "decode keeps nothing of it")


def test_a_sender_that_comes_back_again_and_again_gets_a_fresh_ring_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time with slabs under way that nobody has acknowledged."""
    monkeypatch.setattr(intake_module, "SILENT_S", 0.1)
    with pair(tmp_path, "shm", RING_BYTES) as both:
        before = descriptors(), mappings()
        for number in range(2, 12):
            both.connect_again(number, LinkOptions("shm", "here", ring_bytes=RING_BYTES))
            both.until(both.is_linked, "it is let in again")
            assert ring_is_free(both, RING_BYTES)
            both.link.send_slab(Slab("r", 1, 9, 0, 0, 1, 0, RingSpan(0, RING_BYTES)), memoryview(bytes(RING_BYTES)))

        def only_one_is_left() -> bool:
            both.intake.send_credits()
            return len([*both.intake.poll_bulk(1 << 30)]) == 0 and (descriptors(), mappings()) == before

        both.until(only_one_is_left, "decode keeps the last one only")
        both.connect_again(12, LinkOptions("shm", "here", ring_bytes=RING_BYTES))
        both.until(both.is_linked, "it is let in again")
        ship(both.link, TOKENS)
        both.take()


READER = """
import dataclasses, sys
from pdserve.transfer.offers import RingOffer
from pdserve.transfer.ring import RingReader
pid, fd, size, secret = sys.argv[1:]
reader = RingReader(RingOffer(int(pid), int(fd), int(size), secret))
print(bytes(reader.view(0, 5)).decode(), flush=True)
sys.stdin.read()
"""


def test_a_killed_reader_takes_nothing_with_it() -> None:
    before = descriptors(), mappings()
    ring = RingWriter(RING_BYTES)
    room = ring.allocate(5)
    assert room is not None
    room[1][:] = b"hello"
    offer = ring.offer
    command = [sys.executable, "-c", READER, *map(str, (offer.pid, offer.fd, offer.size_bytes, offer.secret))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "hello\n"
    finally:
        child.kill()
        child.communicate(timeout=10)
    room[1][:] = b"world"
    assert RingReader(offer).view(0, 5) == b"world"
    del room
    ring.close()
    assert (descriptors(), mappings()) == before
