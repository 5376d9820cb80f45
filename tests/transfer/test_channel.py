"""Sockets take valid messages and nothing else, never block, and notice who is gone."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pdserve.transfer.channel import Dealer, FrameCounts, Received, Router, check_exposed, runtime_directory
from pdserve.transfer.codec import encode, seal
from pdserve.transfer.errors import ConfigError
from pdserve.transfer.messages import Cancel, Credit, Slab


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def receive_one(end: Router | Dealer, timeout_s: float = 5.0) -> Received | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        end.socket.poll(50)
        for received in end.receive():
            return received
    return None


def raw_dealer(context: zmq.Context, address: str, identity: bytes = b"raw") -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(address)
    return socket


def test_messages_go_both_ways_with_payload(context: zmq.Context, address: str) -> None:
    router = Router(context, address, FrameCounts())
    dealer = Dealer(context, address, "p#00000000/1", FrameCounts())
    dealer.send(Slab("r", 1, 1, 0, 0, 1, 0), memoryview(b"payload"))
    while dealer.pending:
        dealer.flush()
    received = receive_one(router)
    assert received is not None
    assert (received.sender, bytes(received.payload or b"")) == ("p#00000000/1", b"payload")
    assert router.send("p#00000000/1", Credit(7))
    answer = receive_one(dealer)
    assert answer is not None
    assert answer.message == Credit(7)


def test_sending_to_somebody_who_is_not_there_says_so(context: zmq.Context, address: str) -> None:
    assert not Router(context, address, FrameCounts()).send("nobody", Credit(1))


def test_messages_wait_in_order_until_the_peer_is_there(context: zmq.Context, address: str) -> None:
    dealer = Dealer(context, address, "p#00000000/1", FrameCounts())
    for n in range(20):
        dealer.send(Credit(n))
    router = Router(context, address, FrameCounts())
    seen = []
    deadline = time.monotonic() + 10
    while len(seen) < 20 and time.monotonic() < deadline:
        dealer.flush()
        router.socket.poll(20)
        seen += [r.message.consumed_bytes for r in router.receive()]
    assert seen == list(range(20))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"\x00garbage"], "checksum"),
        ([b""], "checksum"),
        ([seal(b"\x80\x04\x95pickle")], "malformed"),
        ([seal(b"")], "malformed"),
        ([encode(Credit(1)), b"extra"], "parts"),
        ([encode(Slab("r", 1, 1, 0, 0, 1, 0))], "parts"),
        ([b"a", b"b", b"c", b"d"], "parts"),
    ],
)
def test_what_is_not_a_message_is_counted_and_dropped(
    context: zmq.Context, address: str, parts: list[bytes], reason: str
) -> None:
    counts = FrameCounts()
    router = Router(context, address, counts)
    raw = raw_dealer(context, address)
    raw.send_multipart(parts)
    raw.send(encode(Cancel("r", 1)))
    received = receive_one(router)
    assert received is not None
    assert received.message == Cancel("r", 1)
    assert counts.dropped == {reason: 1}


def test_an_identity_that_is_not_ascii_is_dropped(context: zmq.Context, address: str) -> None:
    counts = FrameCounts()
    router = Router(context, address, counts)
    raw = raw_dealer(context, address, b"\xff\xfe\xfd")
    raw.send(encode(Cancel("r", 1)))
    assert receive_one(router, 0.5) is None
    assert counts.dropped == {"identity": 1}


def test_an_address_in_use_is_one_clear_error(context: zmq.Context) -> None:
    first = Router(context, "tcp://127.0.0.1:*", FrameCounts())
    with pytest.raises(ConfigError, match="cannot listen on"):
        Router(context, first.address, FrameCounts())


def test_only_loopback_is_open_without_words() -> None:
    for address in ("tcp://127.0.0.1:1", "tcp://localhost:1", "ipc:///x", "tcp://[::1]:5"):
        check_exposed(address, insecure=False)
    for address in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://[::]:5"):
        with pytest.raises(ConfigError, match="--insecure"):
            check_exposed(address, insecure=False)
        check_exposed(address, insecure=True)


def test_runtime_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = runtime_directory()
    assert path.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_uid == os.getuid()
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        runtime_directory()
