"""The gateway's TCP socket: how it begins to listen, and how it ends so that no client is cut off half-way."""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
import sys

from ..transfer.errors import ConfigError
from .connections import bound_unread_responses

log = logging.getLogger(__name__)

BACKLOG = 2048
SO_ATTACH_FILTER = 26
TCP_FLAGS_OFFSET = 13
TCP_SYN = 0x02
# Classic BPF over a packet that begins with its TCP header: drop it if it is a SYN, else let it pass whole.
DROP_SYN = (
    (0x30, 0, 0, TCP_FLAGS_OFFSET),  # A = flags
    (0x45, 0, 1, TCP_SYN),  # if A & SYN go on, else skip one
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # pass
)


def bind(host: str, port: int) -> socket.socket:
    """A listening-to-be TCP socket. Raises ConfigError when it cannot be had."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_unread_responses(listener)
        listener.bind(address)
        listener.listen(BACKLOG)  # now, since two sockets may be bound to one port as long as neither listens
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def stop_handshakes(listener: socket.socket) -> None:
    """Have the kernel begin no more connections on this socket, while those it has begun can still be accepted.

    Closing a listening socket resets the connections that wait to be accepted, and their clients see a failure where
    a refusal was meant. After this call they can all be accepted, and then the socket be closed; a client that knocks
    in between knocks again a second later and is refused. Linux only; elsewhere it does nothing.
    """
    if sys.platform != "linux" or listener.family not in (socket.AF_INET, socket.AF_INET6):
        return
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in DROP_SYN))
    header = struct.pack("@HP", len(DROP_SYN), ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, header)
    except OSError as error:  # some sandboxes do not allow it
        log.debug("connections made in this moment may be reset: %s", error)
