"""ZeroMQ sockets under rules that were learned by being bitten.

- A `Dealer` is one connection to one peer, with an identity that holds the sender's incarnation. When the peer
  dies the Dealer is closed and a new one made: ZeroMQ would deliver queued messages to the peer's next life.
- A `Router` sends with ROUTER_MANDATORY, so a peer that is gone is an error at once and not a silent drop.
- IMMEDIATE, LINGER 0, DONTWAIT, bounded high-water marks, bounded message size and parts per message. Nothing
  here ever blocks; waiting is the caller's poll with a timeout.
- Every frame is decoded and validated here. What is not a message is counted by reason and dropped.
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

from .errors import ConfigError, ProtocolError
from .messages import PARTS_AFTER_HEADER, Message, decode, encode

CONTROL_MAX_BYTES = 64 * 1024 * 1024
BULK_MAX_BYTES = 1024 * 1024 * 1024
HIGH_WATER_MARK = 10_000
OUTBOX_MAX_MESSAGES = 100_000
MAX_MESSAGES_PER_DRAIN = 1_000

Payload = bytes | memoryview


@dataclass(frozen=True)
class Received:
    """One valid message; `sender` is the peer's identity on a Router and empty on a Dealer."""

    sender: str
    message: Message
    payload: memoryview | None


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
    return socket


def _parse(parts: list[zmq.Frame], counts: FrameCounts, sender: str) -> Received | None:
    try:
        message = decode(parts[0].buffer)
        expected = 1 + PARTS_AFTER_HEADER.get(message.kind, 0)
        if len(parts) != expected:
            raise ProtocolError("parts", f"{message.kind} came in {len(parts)} parts, not {expected}")
    except ProtocolError as error:
        counts.drop(error.reason)
        return None
    return Received(sender, message, memoryview(parts[1].buffer) if expected == 2 else None)


class Dealer:
    """A connection to one peer. Messages wait in a bounded outbox while the peer cannot take them."""

    def __init__(
        self, context: zmq.Context[Any], address: str, identity: str, counts: FrameCounts, *, bulk: bool = False
    ) -> None:
        self.address = address
        self._counts = counts
        self._outbox: deque[tuple[Message, Payload | None]] = deque()
        self.socket = _socket(context, zmq.DEALER, BULK_MAX_BYTES if bulk else CONTROL_MAX_BYTES)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.connect(address)

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

    def __init__(self, context: zmq.Context[Any], address: str, counts: FrameCounts, *, bulk: bool = False) -> None:
        self._counts = counts
        self._path = address.removeprefix("ipc://") if address.startswith("ipc://") else ""
        self.socket = _socket(context, zmq.ROUTER, BULK_MAX_BYTES if bulk else CONTROL_MAX_BYTES)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

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
        """Everything that has arrived (at most `limit` messages), never waiting."""
        for _ in range(limit):
            try:
                identity, *parts = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if len(parts) not in (1, 2):
                self._counts.drop("parts")
                continue
            try:
                sender = identity.bytes.decode("ascii")
            except UnicodeDecodeError:
                self._counts.drop("identity")
                continue
            if (received := _parse(parts, self._counts, sender)) is not None:
                yield received

    def close(self) -> None:
        self.socket.close(linger=0)
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


def check_exposed(address: str, insecure: bool) -> None:
    """Raise ConfigError for a TCP address beyond this machine, unless the user asked for it in words."""
    if not address.startswith("tcp://"):
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False  # a name or a wildcard
    if loopback or insecure:
        return
    raise ConfigError(
        f"{address} is reachable from other machines and its traffic is neither encrypted nor authenticated; "
        "use ipc:// or 127.0.0.1, or say --insecure on a network you trust"
    )
