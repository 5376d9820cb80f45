"""With keys, tcp is encrypted and only listed keys get in; without a keeper nobody does."""

import dataclasses
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.utils.z85

from pdserve.transfer.channel import Dealer, FrameCounts, Router, check_exposed
from pdserve.transfer.codec import encode
from pdserve.transfer.errors import ConfigError
from pdserve.transfer.keys import Curve, create_keys, load_keys, secure_client, zap_answer
from pdserve.transfer.messages import Credit

TCP = "tcp://127.0.0.1:*"


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def curve(directory: Path) -> Curve:
    return load_keys(directory)


def stranger(curve: Curve) -> Curve:
    """Knows the cluster's public key, and has a key pair of its own."""
    public, secret = zmq.curve_keypair()
    return dataclasses.replace(curve, public=public, secret=secret)


def arrives(router: Router, socket: zmq.Socket[bytes] | Dealer, timeout_s: float) -> bool:
    """Does a message from there reach the router?"""
    if isinstance(socket, Dealer):
        socket.send(Credit(1))
    else:
        socket.send(encode(Credit(1)))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if isinstance(socket, Dealer):
            socket.flush()
        router.socket.poll(20)
        if list(router.receive()):
            return True
    return False


def raw_client(context: zmq.Context[Any], address: str, keys: Curve | None, server: bytes = b"") -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, b"raw")
    if keys is not None:
        secure_client(socket, keys)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server or keys.public)
    socket.connect(address)
    return socket


def test_the_secret_is_for_its_owner_only_and_never_shown(directory: Path, curve: Curve) -> None:
    assert stat.S_IMODE((directory / "cluster.key").stat().st_mode) == 0o600
    assert curve.secret.decode() not in repr(curve)


def test_existing_keys_are_never_overwritten(directory: Path, curve: Curve) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        create_keys(directory)
    assert load_keys(directory) == curve


def test_keys_that_cannot_work_are_one_clear_error(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pdserve keys"):
        load_keys(tmp_path / "nothing")
    (directory / "cluster.key").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(directory)
    (directory / "cluster.key").chmod(0o600)
    (directory / "authorized" / "cluster.pub").unlink()
    with pytest.raises(ConfigError, match="refuse each other"):
        load_keys(directory)
    (directory / "cluster.pub").write_text("not a key\n")
    with pytest.raises(ConfigError, match="is not a key"):
        load_keys(directory)


def test_two_keys_that_do_not_match_are_refused(directory: Path, tmp_path: Path) -> None:
    create_keys(tmp_path / "other")
    (directory / "cluster.pub").write_bytes((tmp_path / "other" / "cluster.pub").read_bytes())
    with pytest.raises(ConfigError, match="do not belong together"):
        load_keys(directory)


def test_a_peer_with_the_keys_gets_in_and_is_answered(context: zmq.Context[Any], curve: Curve) -> None:
    router = Router(context, TCP, FrameCounts(), curve)
    dealer = Dealer(context, router.address, "p#00000000/1", FrameCounts(), curve)
    assert arrives(router, dealer, 10)
    assert router.send("p#00000000/1", Credit(2))
    assert dealer.socket.poll(5000)
    assert [r.message for r in dealer.receive()] == [Credit(2)]


def test_nobody_else_gets_in_and_each_refusal_is_counted(context: zmq.Context[Any], curve: Curve) -> None:
    counts = FrameCounts()
    router = Router(context, TCP, counts, curve)
    assert not arrives(router, raw_client(context, router.address, None), 0.5)
    assert not arrives(router, raw_client(context, router.address, stranger(curve), curve.public), 0.5)
    assert not arrives(router, raw_client(context, router.address, curve, stranger(curve).public), 0.5)
    assert counts.dropped["handshake"] >= 2
    assert set(counts.dropped) == {"handshake"}
    assert arrives(router, Dealer(context, router.address, "p#00000000/1", FrameCounts(), curve), 10)


def test_a_key_that_is_added_gets_in_and_one_that_is_taken_out_does_not(
    context: zmq.Context[Any], curve: Curve
) -> None:
    router = Router(context, TCP, FrameCounts(), curve)
    other = stranger(curve)
    (curve.authorized / "other.pub").write_bytes(other.public + b"\n")
    assert arrives(router, raw_client(context, router.address, other, curve.public), 10)
    (curve.authorized / "other.pub").unlink()
    assert not arrives(router, raw_client(context, router.address, other, curve.public), 0.5)


def test_without_a_keeper_the_door_stays_shut(context: zmq.Context[Any], curve: Curve) -> None:
    """ZeroMQ alone would admit every client that knows the server's public key."""
    other = zmq.Context()
    socket = other.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"pdserve")
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.bind(TCP)
    raw_client(context, socket.last_endpoint.decode(), curve).send(b"x")
    assert not socket.poll(500)
    other.destroy(linger=0)


def test_ipc_stays_plain(context: zmq.Context[Any], curve: Curve, tmp_path: Path) -> None:
    router = Router(context, f"ipc://{tmp_path}/s", FrameCounts(), curve)
    assert arrives(router, raw_client(context, router.address, None), 10)


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda request: request[:6],
        lambda request: [b"2.0", *request[1:]],
        lambda request: [*request[:2], b"other", *request[3:]],
        lambda request: [*request[:5], b"NULL"],
        lambda request: [*request[:5], b"PLAIN", b"user", b"password"],
        lambda request: [*request[:6], b"\0" * 32],
        lambda request: [],
    ],
)
def test_the_keeper_says_yes_to_nothing_but_a_listed_key(curve: Curve, spoilt: Any) -> None:
    key = zmq.utils.z85.decode(curve.public)
    request = [b"1.0", b"7", b"pdserve", b"10.0.0.1", b"id", b"CURVE", key]
    assert zap_answer(request, curve)[:3] == [b"1.0", b"7", b"200"]
    assert zap_answer(spoilt(request), curve)[2] == b"400"


def test_an_unreadable_list_admits_nobody(curve: Curve) -> None:
    assert curve.admits(curve.public)
    (curve.authorized / "broken.pub").write_text("?")
    (curve.authorized / "a-broken.pub").write_text("?")
    assert not curve.admits(curve.public)


def test_beyond_this_machine_tcp_needs_keys_or_words(curve: Curve) -> None:
    with pytest.raises(ConfigError, match="--keys DIR"):
        check_exposed("tcp://10.0.0.1:1", insecure=False)
    check_exposed("tcp://10.0.0.1:1", insecure=False, curve=curve)


def test_the_context_ends_although_the_keeper_waits(curve: Curve) -> None:
    context: zmq.Context[Any] = zmq.Context()
    Router(context, TCP, FrameCounts(), curve)
    ending = threading.Thread(target=context.destroy, args=(0,), daemon=True)
    ending.start()
    ending.join(30)
    assert not ending.is_alive()
