"""What a connection can make a listening socket hold is bounded, and honest peers do not notice."""

import contextlib
import socket as sockets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from pdserve.transfer import guard
from pdserve.transfer.channel import STRANGER_FRAME_BYTES, STRANGERS_PER_DRAIN, Dealer, FrameCounts, Received, Router
from pdserve.transfer.codec import encode
from pdserve.transfer.guard import Guard
from pdserve.transfer.keys import create_keys, load_keys
from pdserve.transfer.messages import Credit, Message, Slab

MIB = 1024 * 1024
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def ready(identity: bytes) -> bytes:
    """The ZMTP handshake of a DEALER, written by hand."""

    def text(name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

    body = b"\x05READY" + text(b"Socket-Type", b"DEALER") + text(b"Identity", identity)
    return GREETING + b"\x04" + bytes([len(body)]) + body


def raw_peer(router: Router, identity: bytes = b"raw#00000000/1") -> sockets.socket:
    """A connection past the handshake, on which any bytes can be sent."""
    host, port = router.address.removeprefix("tcp://").split(":")
    peer = sockets.create_connection((host, int(port)), timeout=10)
    handshake = ready(identity)
    peer.sendall(handshake[: len(GREETING)])
    peer.recv(len(GREETING), sockets.MSG_WAITALL)
    peer.sendall(handshake[len(GREETING) :])
    peer.recv(4096)  # the other side is ready
    return peer


def is_cut(peer: sockets.socket, feed: bytes, router: Router, timeout_s: float = 20.0) -> bool:
    """Go on sending `feed` until the other side ends it, while the router's owner goes on receiving."""
    deadline = time.monotonic() + timeout_s
    peer.settimeout(0.05)
    rest = feed
    while time.monotonic() < deadline:
        list(router.receive())
        try:
            rest = rest[peer.send(rest) :] or feed
        except TimeoutError:
            with contextlib.suppress(TimeoutError):
                while peer.recv(4096):
                    continue
                return True
        except OSError:
            return True
    return False


def say(dealer: Dealer, message: Message) -> None:
    dealer.send(message)
    deadline = time.monotonic() + 10
    while dealer.pending and time.monotonic() < deadline:
        dealer.flush()


def collect(router: Router, wanted: Callable[[list[Received]], bool], timeout_s: float = 20.0) -> list[Received]:
    got: list[Received] = []
    deadline = time.monotonic() + timeout_s
    while not wanted(got) and time.monotonic() < deadline:
        router.socket.poll(20)
        for received in router.receive():
            got.append(received)
            router.trust(received.connection)
    return got


def test_parts_without_end_are_cut_before_they_fill_the_memory(context: zmq.Context[Any]) -> None:
    """Neither the high-water mark nor the size limit of ZeroMQ bounds this."""
    counts = FrameCounts()
    router = Router(context, "tcp://127.0.0.1:*", counts)
    before = psutil.Process().memory_info().rss
    with raw_peer(router) as peer:
        assert is_cut(peer, b"\x01\x00" * 50_000, router)  # empty parts with MORE: 64 bytes of memory for two
    assert psutil.Process().memory_info().rss - before < 400 * MIB
    assert list(router.receive()) == []
    assert counts.dropped == {"backlog": 1}


def test_the_socket_serves_others_during_and_after_such_an_attack(context: zmq.Context[Any]) -> None:
    router = Router(context, "tcp://127.0.0.1:*", FrameCounts())
    honest = Dealer(context, router.address, "p#00000000/1", FrameCounts())
    with raw_peer(router) as peer:
        peer.sendall(b"\x01\x00" * 10_000)
        say(honest, Credit(1))
        assert [r.message for r in collect(router, bool)] == [Credit(1)]
        assert is_cut(peer, b"\x01\x00" * 50_000, router)
    say(honest, Credit(2))
    assert [r.message for r in collect(router, bool)] == [Credit(2)]


def test_a_stranger_who_sends_refuse_is_cut_and_counted(context: zmq.Context[Any], tmp_path: Path) -> None:
    for number, address in enumerate(("tcp://127.0.0.1:*", f"ipc://{tmp_path}/s")):
        counts = FrameCounts()
        router = Router(context, address, counts)
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.IDENTITY, b"x%d" % number)
        raw.setsockopt(zmq.RECONNECT_IVL, -1)
        raw.connect(router.address)
        for _ in range(600):
            raw.send(b"\x80\x04\x95pickle")
        deadline = time.monotonic() + 10
        while not counts.dropped["flood"] and time.monotonic() < deadline:
            router.socket.poll(20)
            list(router.receive())
        assert counts.dropped["flood"] == 1, address
        assert counts.dropped["checksum"] + counts.dropped["stranger_flood"] > guard.OFFENCES_ALLOWED


def test_a_trickle_of_refuse_is_forgiven(context: zmq.Context[Any], tmp_path: Path) -> None:
    counts = FrameCounts()
    router = Router(context, f"ipc://{tmp_path}/s", counts)
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.IDENTITY, b"x")
    raw.connect(router.address)
    for _ in range(int(STRANGERS_PER_DRAIN) - 2):
        raw.send(b"refuse")
    raw.send(encode(Credit(1)))
    assert [r.message for r in collect(router, bool)] == [Credit(1)]
    assert "flood" not in counts.dropped


def test_large_frames_of_strangers_are_not_decoded_but_those_of_peers_are(
    context: zmq.Context[Any], tmp_path: Path
) -> None:
    counts = FrameCounts()
    router = Router(context, f"ipc://{tmp_path}/s", counts, bulk=True)
    dealer = Dealer(context, router.address, "p#00000000/1", FrameCounts(), bulk=True)
    slab, payload = Slab("r", 1, 1, 0, 0, 1, 0), memoryview(bytes(STRANGER_FRAME_BYTES + 1))
    dealer.send(slab, payload)
    dealer.send(Credit(1))
    deadline = time.monotonic() + 10
    while dealer.pending and time.monotonic() < deadline:
        dealer.flush()
    assert [r.message for r in collect(router, bool)] == [Credit(1)]
    assert counts.dropped["stranger_oversize"] == 1
    dealer.send(slab, payload)
    assert [r.message for r in collect(router, bool)] == [slab]


@pytest.mark.parametrize("encrypted", [False, True])
def test_all_that_an_honest_peer_sends_is_accounted_for(
    context: zmq.Context[Any], tmp_path: Path, encrypted: bool
) -> None:
    """What the guard believes to be under way must not creep up over the life of a connection."""
    curve = None
    if encrypted:
        create_keys(tmp_path / "keys")
        curve = load_keys(tmp_path / "keys")
    router = Router(context, "tcp://127.0.0.1:*", FrameCounts(), curve, bulk=True)
    dealer = Dealer(context, router.address, "p#00000000/1", FrameCounts(), curve, bulk=True)
    dealer.send(Credit(0))
    while dealer.pending:
        dealer.flush()
    assert len(collect(router, bool)) == 1
    for size in (0, 1, 100, 200, 230, 255, 256, 300, 70_000):
        for _ in range(50):
            dealer.send(Slab("r", 1, 1, 0, 0, 1, 0), memoryview(bytes(size)))
    while dealer.pending:
        dealer.flush()
    assert len(collect(router, lambda got: len(got) == 450)) == 450
    (connection,) = router._guard._connections.values()
    with guard._socket_of(connection) as handle:
        assert handle is not None
        under_way = (guard._received_bytes(handle) or 0) - connection.delivered_bytes
    assert 0 <= under_way < 600  # the handshake


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@pytest.mark.parametrize("numbers_cut", [0, 1000])
def test_trust_given_before_the_news_of_a_connection_is_kept(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transport: str, numbers_cut: int
) -> None:
    """The guard's thread may learn of a connection after the owner has taken its first message; and its number may
    be that of one which was cut."""
    news, told = threading.Event(), threading.Event()
    take_events = Guard._take_events

    def take_late(watcher: Guard, monitor: zmq.Socket[bytes]) -> None:
        assert news.wait(10)
        take_events(watcher, monitor)
        told.set()

    monkeypatch.setattr(Guard, "_take_events", take_late)
    address = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/s"
    router = Router(context, address, FrameCounts())
    router._guard._cut_cookies.update(dict.fromkeys(range(numbers_cut), b"of another"))
    dealer = Dealer(context, router.address, "p#00000000/1", FrameCounts())
    dealer.send(Credit(1))
    while dealer.pending:
        dealer.flush()
    assert collect(router, bool)
    (early,) = router._guard._connections.values()
    news.set()
    assert told.wait(10)
    (connection,) = router._guard._connections.values()
    assert connection is early
    assert connection.trusted
    assert connection.delivered_bytes


def test_watching_a_number_that_now_is_something_else_costs_no_descriptor(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "CLOSED_KEPT_S", 0.0)
    router = Router(context, "tcp://127.0.0.1:*", FrameCounts())
    with Path(__file__).open("rb") as file:  # what a closed connection's number was given to
        connections = router._guard._connections
        connections[file.fileno()] = guard.Connection(file.fileno(), b"cookie")
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(100):
            router._guard._measure()
            router._guard._is_open(guard.Connection(file.fileno(), b"cookie"))
            router._guard.delivered(file.fileno(), [1])
        assert not connections
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 5


def test_a_closed_connection_keeps_its_standing_while_its_last_messages_come_out(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "CLOSED_KEPT_S", 1.0)
    router = Router(context, "tcp://127.0.0.1:*", FrameCounts(), bulk=True)
    dealer = Dealer(context, router.address, "p#00000000/1", FrameCounts(), bulk=True)
    say(dealer, Credit(1))
    assert collect(router, bool)
    slab = Slab("r", 1, 1, 0, 0, 1, 0)
    for _ in range(3):
        dealer.send(slab, memoryview(bytes(STRANGER_FRAME_BYTES + 1)))
    dealer.close(linger_ms=5000)
    (connection,) = router._guard._connections.values()
    deadline = time.monotonic() + 10
    while connection.closed_at is None and time.monotonic() < deadline:
        router.socket.poll(20)  # the messages wait in ZeroMQ's queue
    assert connection.closed_at is not None
    assert [received.message for received in collect(router, lambda got: len(got) == 3)] == [slab] * 3
    while router._guard._connections and time.monotonic() < deadline:
        router._guard._measure()
        router.socket.poll(20)
    assert not router._guard._connections


def test_the_oldest_of_too_many_strangers_goes_and_peers_stay(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_STRANGERS", 20)
    counts = FrameCounts()
    router = Router(context, "tcp://127.0.0.1:*", counts)
    honest = Dealer(context, router.address, "p#00000000/1", FrameCounts())
    honest.send(Credit(1))
    while honest.pending:
        honest.flush()
    assert collect(router, bool)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(raw_peer(router, b"s%d" % i)) for i in range(30)]
        crowd[0].settimeout(10)
        with contextlib.suppress(ConnectionError):  # an end or a reset
            while crowd[0].recv(4096):
                continue
        deadline = time.monotonic() + 10
        while counts.dropped["too_many_connections"] < 10 and time.monotonic() < deadline:
            router.socket.poll(20)
            list(router.receive())
        assert counts.dropped["too_many_connections"] == 10
        honest.send(Credit(2))
        assert [r.message for r in collect(router, bool)] == [Credit(2)]


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\x00" * 1000,
        bytes(range(256)) * 50,
        GREETING[:11],
        GREETING,
        b"GET / HTTP/1.1\r\n\r\n",
        ready(b"x") + b"\x02" + b"\xff" * 8,  # a frame of 2^64 - 1 bytes
        ready(b"x") + b"\x02" + struct.pack(">Q", 1 << 40),
        ready(b"x") + b"\x04\xff" + b"\xff" * 255,  # a command nobody knows
    ],
    ids=["nothing", "zeros", "all bytes", "short", "greeting", "http", "2^64", "2^40", "command"],
)
def test_noise_below_the_messages_harms_nobody(context: zmq.Context[Any], noise: bytes) -> None:
    router = Router(context, "tcp://127.0.0.1:*", FrameCounts())
    host, port = router.address.removeprefix("tcp://").split(":")
    with sockets.create_connection((host, int(port)), timeout=5) as peer:
        peer.sendall(noise)
        honest = Dealer(context, router.address, "p#00000000/1", FrameCounts())
        honest.send(Credit(1))
        deadline = time.monotonic() + 10
        got: list[Received] = []
        while not got and time.monotonic() < deadline:
            honest.flush()
            got = [r for r in collect(router, bool, 0.1) if r.sender == "p#00000000/1"]
        assert [r.message for r in got] == [Credit(1)]
