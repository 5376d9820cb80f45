"""ZeroMQ sockets under rules that were learned by being bitten.

- A `Dealer` is one connection to one peer, with an identity that holds the sender's incarnation. When the peer
  dies the Dealer is closed and a new one made: ZeroMQ would deliver queued messages to the peer's next life.
- A `Router` sends with ROUTER_MANDATORY, so a peer that is gone is an error at once and not a silent drop.
- IMMEDIATE, LINGER 0, DONTWAIT, bounded high-water marks, bounded message size and parts per message. Nothing
  here ever blocks; waiting is the caller's poll with a timeout.
- Every frame is decoded and validated here. What is not a message is counted by reason and dropped.
- Whoever connects to a Router is a stranger until its owner trusts it (`guard.py`): large frames of strangers are not
  even decoded, and a connection that sends little but refuse, or parts without end, is cut.
- With a `Curve` (`keys.py`) tcp is encrypted and admits listed keys only; ipc stays plain, guarded by its directory.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from .codec import decode, encode, parts_after
from .device import DeviceSpan
from .errors import ConfigError, ProtocolError
from .guard import Guard, Standing
from .keys import Curve, secure_client, secure_listener
from .messages import Message

CONTROL_MAX_BYTES = 64 * 1024 * 1024
BULK_MAX_BYTES = 256 * 1024 * 1024
CONTROL_BACKLOG_BYTES = CONTROL_MAX_BYTES  # what a trusted peer may have sent that was not taken yet
BULK_BACKLOG_BYTES = 2 * BULK_MAX_BYTES  # more than the window granted to a sender, and one message
STRANGER_FRAME_BYTES = 256 * 1024
STRANGERS_PER_DRAIN = 32  # messages of strangers that are decoded; more are dropped unread
LISTENER_HIGH_WATER_MARK = 1_000  # messages one peer may have waiting here
HANDSHAKE_TIMEOUT_MS = 10_000
HIGH_WATER_MARK = 10_000
OUTBOX_MAX_MESSAGES = 100_000
MAX_MESSAGES_PER_DRAIN = 1_000

Payload = bytes | memoryview


@dataclass(frozen=True)
class Received:
    """One valid message; `sender` is the peer's identity on a Router and empty on a Dealer.

    `connection` is what a Router's `trust` and `blame` want to know of its origin. A payload in a ring is added by
    whoever has the ring.
    """

    sender: str
    message: Message
    payload: memoryview | DeviceSpan | None
    connection: int = -1


@dataclass
class FrameCounts:
    """Frames dropped, by reason (metric pdserve_frames_dropped_total)."""

    dropped: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str) -> None:
        self.dropped[reason] += 1


def _socket(context: zmq.Context[Any], kind: int, max_bytes: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    return socket


def _parse(parts: list[zmq.Frame], counts: FrameCounts, sender: str, connection: int = -1) -> Received | None:
    try:
        message = decode(parts[0].buffer)
        expected = 1 + parts_after(message)
        if len(parts) != expected:
            raise ProtocolError("parts", f"{message.kind} came in {len(parts)} parts, not {expected}")
    except ProtocolError as error:
        counts.drop(error.reason)
        return None
    return Received(sender, message, memoryview(parts[1].buffer) if expected == 2 else None, connection)


class Dealer:
    """A connection to one peer. Messages wait in a bounded outbox while the peer cannot take them.

    Raises ConfigError for an address that cannot be one.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, identity: str, counts: FrameCounts, curve: Curve | None = None,
        *, bulk: bool = False,
    ) -> None:  # fmt: skip
        self.address = address
        self._counts = counts
        self._outbox: deque[tuple[Message, Payload | None]] = deque()
        self.socket = _socket(context, zmq.DEALER, BULK_MAX_BYTES if bulk else CONTROL_MAX_BYTES)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        if curve is not None and is_tcp(address):
            secure_client(self.socket, curve)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise ConfigError(f"cannot connect to {address!r}: {error.strerror}") from None

    def send(self, message: Message, payload: Payload | None = None) -> None:
        """Queue one message and push out what the socket takes. Order is kept.

        `payload` must stay untouched by the caller for ever: it is sent without a copy.
        """
        self._outbox.append((message, payload))
        self.flush()

    @property
    def overfull(self) -> bool:
        """True when the peer has not taken anything for so long that it must be given up."""
        return len(self._outbox) > OUTBOX_MAX_MESSAGES

    @property
    def pending(self) -> int:
        return len(self._outbox)

    def flush(self) -> None:
        while self._outbox:
            message, payload = self._outbox[0]
            try:
                if payload is None:
                    self.socket.send(encode(message), zmq.DONTWAIT)
                else:
                    self.socket.send_multipart([encode(message), payload], zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._outbox.popleft()

    def receive(self) -> Iterator[Received]:
        """Everything that has arrived (at most a bounded number), never waiting."""
        for _ in range(MAX_MESSAGES_PER_DRAIN):
            try:
                parts = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if (received := _parse(parts, self._counts, "")) is not None:
                yield received

    def close(self, linger_ms: int = 0) -> None:
        """Close now; `linger_ms` lets ZeroMQ's own thread push out a last word for that long."""
        self._outbox.clear()
        self.socket.close(linger=linger_ms)


class Router:
    """A bound socket that many peers connect to, each known by its identity."""

    def __init__(
        self, context: zmq.Context[Any], address: str, counts: FrameCounts, curve: Curve | None = None,
        *, bulk: bool = False,
    ) -> None:  # fmt: skip
        self._counts = counts
        self._path = address.removeprefix("ipc://") if address.startswith("ipc://") else ""
        self.socket = _socket(context, zmq.ROUTER, BULK_MAX_BYTES if bulk else CONTROL_MAX_BYTES)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.RCVHWM, LISTENER_HIGH_WATER_MARK)
        self._strangers_left = 0
        encrypted = curve is not None and is_tcp(address)
        if curve is not None and encrypted:
            secure_listener(context, self.socket, curve)
        backlog_bytes = BULK_BACKLOG_BYTES if bulk else CONTROL_BACKLOG_BYTES
        self._guard = Guard(context, self.socket, backlog_bytes, encrypted)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._guard.bound(self.address)

    def send(self, peer: str, message: Message) -> bool:
        """True if the message is on its way; False if that peer is not connected (any more) or does not read."""
        try:
            self.socket.send_multipart([peer.encode(), encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def receive(self, limit: int = MAX_MESSAGES_PER_DRAIN) -> Iterator[Received]:
        """Everything that has arrived (at most `limit` messages), never waiting. Peers take turns (ZeroMQ's rule)."""
        for reason in self._guard.take_dropped():
            self._counts.drop(reason)
        self._strangers_left = STRANGERS_PER_DRAIN
        for _ in range(limit):
            try:
                identity, *parts = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if (received := self._take(identity, parts)) is not None:
                yield received

    def _take(self, identity: zmq.Frame, parts: list[zmq.Frame]) -> Received | None:
        """One message, or None and a black mark for its sender."""
        try:
            connection = int(identity.get("__fd"))
        except zmq.ZMQError:  # a peer that speaks ZMTP 1 or 2, or noise that looks like it; the guard ends it soon
            self._counts.drop("old_protocol")
            return None
        standing = self._guard.delivered(connection, [len(part) for part in parts])
        if standing is Standing.CUT:
            self._counts.drop("cut")
            return None
        received = None
        if standing is Standing.STRANGER:
            self._strangers_left -= 1
        if len(parts) not in (1, 2):
            self._counts.drop("parts")
        elif standing is Standing.STRANGER and any(len(part) > STRANGER_FRAME_BYTES for part in parts):
            self._counts.drop("stranger_oversize")
        elif standing is Standing.STRANGER and self._strangers_left < 0:
            self._counts.drop("stranger_flood")
        else:
            try:
                received = _parse(parts, self._counts, identity.bytes.decode("ascii"), connection)
            except UnicodeDecodeError:
                self._counts.drop("identity")
        if received is None:
            self._guard.blame(connection)
        return received

    def trust(self, connection: int) -> None:
        """A peer that was let in. To be repeated with its messages: it may have connected anew."""
        self._guard.trust(connection)

    def blame(self, connection: int) -> None:
        """A message from there is wanted by nobody. A peer that goes on like that is disconnected."""
        self._guard.blame(connection)

    def close(self, linger_ms: int = 0) -> None:
        """Close now; `linger_ms` lets ZeroMQ's own thread push out a last word for that long."""
        self.socket.close(linger=linger_ms)
        if self._path:
            Path(self._path).unlink(missing_ok=True)


def runtime_directory() -> Path:
    """A directory of this user's only (mode 0700) for ipc sockets.

    Raises ConfigError when somebody else owns it or may enter it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "pdserve" if base else Path(f"/tmp/pdserve-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make the runtime directory {path}: {error.strerror}") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(f"the runtime directory {path} must be a directory of this user with mode 0700")
    return path


def is_tcp(address: str) -> bool:
    return address.startswith("tcp://")


def is_loopback(host: str) -> bool:
    """Is what listens there out of reach for other machines?"""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name or a wildcard


def check_exposed(address: str, insecure: bool, curve: Curve | None = None) -> None:
    """Raise ConfigError for a TCP address beyond this machine without keys, unless the user asked for it in words."""
    if not is_tcp(address) or curve is not None:
        return
    if insecure or is_loopback(address.removeprefix("tcp://").rpartition(":")[0].strip("[]")):
        return
    raise ConfigError(
        f"{address} is reachable from other machines and its traffic is neither encrypted nor authenticated; "
        "give --keys DIR (made by `pdserve keys DIR`), or say --insecure on a network you trust"
    )
