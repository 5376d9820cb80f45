"""The guard of one listening socket: knows every connection, and cuts those that would fill this process.

ZeroMQ shows a message only when its last part is here, and neither its high-water mark nor its size limit counts the
parts of one that never ends. So the guard measures from outside: the kernel says how many bytes a TCP connection has
brought (TCP_INFO), the owner how many it was given as messages; the rest sits in ZeroMQ's memory. A connection with too
much of that is shut down, which makes ZeroMQ drop what it has of it. A peer on a unix socket is not measured (the
kernel does not count there): the directory's permissions leave only this user.

A connection is a *stranger* until the owner trusts it. Strangers may have little under way, may be few at a time (the
oldest goes), and are cut off when they send more than a trickle of what nobody wants.

The guard runs in a thread of its own: what it guards against does not wait for a long step to end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

CHECK_EVERY_MS = 50
CLOSED_KEPT_S = 5.0  # a closed connection's standing, for what it has sent and nobody has taken yet
STRANGER_MAX_BYTES = 1024 * 1024
MAX_STRANGERS = 256
OFFENCES_ALLOWED = 100.0
OFFENCES_FORGIVEN_PER_S = 20.0
SO_COOKIE = 57  # a number no other socket of this machine has had since it started
BYTES_RECEIVED_OFFSET = 128  # of tcpi_bytes_received in struct tcp_info
CURVE_BYTES_PER_FRAME = 33  # name and nonce of the command around each frame, its flags and authenticator
LONG_FRAME_BYTES = 255

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
EVENTS = HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED

_numbers = itertools.count()


def wire_bytes(frame_bytes: int, encrypted: bool) -> int:
    """What a frame of that size takes on the wire."""
    if encrypted:
        frame_bytes += CURVE_BYTES_PER_FRAME
    return frame_bytes + (2 if frame_bytes <= LONG_FRAME_BYTES else 9)


class Standing(Enum):
    TRUSTED = "trusted"
    STRANGER = "stranger"
    CUT = "cut"  # what it had sent before is still coming out


@dataclass
class Connection:
    """One accepted connection."""

    descriptor: int
    cookie: bytes
    delivered_bytes: int = 0  # on the wire, of the messages the owner has taken
    trusted: bool = False
    offences: float = 0.0
    offended_at: float = field(default_factory=time.monotonic)
    closed_at: float | None = None  # when it was found closed; what it had sent may still be coming out


@contextlib.contextmanager
def _socket_at(descriptor: int) -> Iterator[sockets.socket | None]:
    """A handle of our own on the socket of that number; None when there is none (any more)."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    try:
        handle = sockets.socket(fileno=copy)
    except OSError:  # it is something else
        os.close(copy)
        yield None
        return
    with handle:
        yield handle


@contextlib.contextmanager
def _socket_of(connection: Connection) -> Iterator[sockets.socket | None]:
    """A handle on the connection's socket, None when it is closed; its number may belong to something else by now."""
    with _socket_at(connection.descriptor) as handle:
        yield handle if handle is not None and _cookie(handle) == connection.cookie else None


def _cookie(handle: sockets.socket) -> bytes:
    return handle.getsockopt(sockets.SOL_SOCKET, SO_COOKIE, 8)


def _came_to(address: str, handle: sockets.socket) -> bool:
    """Whether the socket is one that was accepted at `address`, rather than another use of its number."""
    name = handle.getsockname()
    if isinstance(name, str):
        return address == f"ipc://{name}"
    return address.startswith("tcp://") and address.endswith(f":{name[1]}")


def _received_bytes(handle: sockets.socket) -> int | None:
    """All bytes this connection has ever brought; None when the kernel does not count them."""
    if handle.family not in (sockets.AF_INET, sockets.AF_INET6):
        return None
    info = handle.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, 256)
    if len(info) < BYTES_RECEIVED_OFFSET + 8:
        return None
    count: int = struct.unpack_from("=Q", info, BYTES_RECEIVED_OFFSET)[0]
    return count


class Guard:
    """Watches one socket that is about to be bound. `delivered`, `trust` and `blame` are for the socket's owner."""

    def __init__(
        self, context: zmq.Context[Any], socket: zmq.Socket[bytes], trusted_max_bytes: int, encrypted: bool
    ) -> None:
        """`trusted_max_bytes`: what a trusted peer may have under way, on the wire."""
        self._trusted_max_bytes = trusted_max_bytes
        self._encrypted = encrypted
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._cut_cookies: dict[int, bytes] = {}  # by descriptor, while its number was not given to a new connection
        self._dropped: deque[str] = deque(maxlen=100_000)
        self._address = ""  # where the socket listens
        address = f"inproc://guard-{os.getpid()}-{next(_numbers)}"
        socket.monitor(address, EVENTS)
        # Of a shadow context, whose sockets `destroy` of the context itself does not close under the thread's feet.
        monitor: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(address)
        threading.Thread(target=self._run, args=(monitor,), name="guard", daemon=True).start()

    # --- for the owner of the socket -----------------------------------------------------------------------------

    def bound(self, address: str) -> None:
        """The socket listens there now."""
        self._address = address

    def delivered(self, descriptor: int, frame_bytes: list[int]) -> Standing:
        """Note a message that was taken, by the sizes of its frames. Returns how its sender stands."""
        connection = self._connection(descriptor)
        if connection is None:
            return Standing.CUT if descriptor in self._cut_cookies else Standing.STRANGER
        connection.delivered_bytes += sum(wire_bytes(size, self._encrypted) for size in frame_bytes)
        return Standing.TRUSTED if connection.trusted else Standing.STRANGER

    def trust(self, descriptor: int) -> None:
        """This connection belongs to a peer that was let in."""
        if (connection := self._connections.get(descriptor)) is not None:
            connection.trusted = True

    def blame(self, descriptor: int) -> None:
        """This connection has sent what nobody wants; one that does little else is cut."""
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        now = time.monotonic()
        forgiven = (now - connection.offended_at) * OFFENCES_FORGIVEN_PER_S
        connection.offences, connection.offended_at = max(connection.offences - forgiven, 0.0) + 1.0, now
        if connection.offences > OFFENCES_ALLOWED:
            self._cut(connection, "flood")

    def take_dropped(self) -> Iterator[str]:
        """Reasons for which connections were refused or cut since the last call."""
        while self._dropped:
            yield self._dropped.popleft()

    def _connection(self, descriptor: int) -> Connection | None:
        """The connection of that number. Its first message may be here before the news that it was accepted."""
        connection = self._connections.get(descriptor)
        if connection is None:
            with _socket_at(descriptor) as handle:
                if handle is not None and _came_to(self._address, handle):
                    return self._meet(descriptor, _cookie(handle))
        return connection

    def _meet(self, descriptor: int, cookie: bytes) -> Connection | None:
        """The connection that is open there; None if it was cut."""
        with self._lock:
            if self._cut_cookies.get(descriptor) == cookie:
                return None
            connection = self._connections.get(descriptor)
            if connection is None or connection.cookie != cookie:
                connection = self._connections[descriptor] = Connection(descriptor, cookie)
                self._cut_cookies.pop(descriptor, None)
        return connection

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self, monitor: zmq.Socket[bytes]) -> None:
        try:
            while not monitor.closed:
                monitor.poll(CHECK_EVERY_MS if self._connections else None)
                self._take_events(monitor)
                self._measure()
        except zmq.ContextTerminated:
            monitor.close()

    def _take_events(self, monitor: zmq.Socket[bytes]) -> None:
        """Follow who comes and goes. Closes the monitor when the socket was closed."""
        while monitor.poll(0):
            event = parse_monitor_message(monitor.recv_multipart())
            match event["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._accepted(event["value"])
                case zmq.EVENT_MONITOR_STOPPED:
                    monitor.close()
                    return
                case _:
                    self._dropped.append("handshake")

    def _accepted(self, descriptor: int) -> None:
        with _socket_at(descriptor) as handle:
            if handle is None:  # it has gone already
                return
            self._meet(descriptor, _cookie(handle))
        with self._lock:
            strangers = [other for other in self._connections.values() if not other.trusted]
        if len(strangers) > MAX_STRANGERS:
            strangers = [other for other in strangers if self._is_open(other)]
        if len(strangers) > MAX_STRANGERS:
            self._cut(strangers[0], "too_many_connections")

    def _is_open(self, connection: Connection) -> bool:
        with _socket_of(connection) as handle:
            return handle is not None

    def _measure(self) -> None:
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            with _socket_of(connection) as handle:
                received = None if handle is None else _received_bytes(handle)
                if handle is None:
                    self._closed(connection)
            limit = self._trusted_max_bytes if connection.trusted else STRANGER_MAX_BYTES
            # `delivered_bytes` is read last, so what was taken meanwhile is not held against the peer.
            if received is not None and received - connection.delivered_bytes > limit:
                self._cut(connection, "backlog")

    def _closed(self, connection: Connection) -> None:
        """Forget it, when its last messages have had their time."""
        now = time.monotonic()
        if connection.closed_at is None:
            connection.closed_at = now
        if now - connection.closed_at < CLOSED_KEPT_S:
            return
        with self._lock:
            if self._connections.get(connection.descriptor) is connection:
                del self._connections[connection.descriptor]

    def _cut(self, connection: Connection, reason: str) -> None:
        """End the connection; ZeroMQ notices, and forgets what it has of it."""
        with self._lock:
            if self._connections.get(connection.descriptor) is not connection:
                return
            del self._connections[connection.descriptor]
            self._cut_cookies[connection.descriptor] = connection.cookie
        self._dropped.append(reason)
        with _socket_of(connection) as handle:
            if handle is not None:
                with contextlib.suppress(OSError):  # it has gone by itself
                    handle.shutdown(sockets.SHUT_RDWR)
