"""Frames between a worker and its grammar process: a length, then msgpack, over a pair of stream sockets.

worker → grammars   ["compile", grammar, kind, text]       answered by "compiled" when it is done
                    ["evict", grammar]                      nobody needs it any more
                    ["masks", round, [[automaton, grammar, start, tokens], ...]]
                                                            its tokens from `start` on; answered row by row
                    ["forget", [automaton, ...]]
grammars → worker   ["ready"]                               the tokenizer is there
                    ["compiled", grammar, bytes, error]     bytes of memory; error "" when all is well
                    ["mask", round, automaton, mask, error] bit i of it: token i may come next
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

LENGTH_BYTES = 4
READ_BYTES = 1 << 20

_pack: Callable[..., bytes] = msgpack.packb


def frame(message: list[Any]) -> bytes:
    body = _pack(message, use_bin_type=True)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class Frames:
    """What has been read of a stream, and the whole frames in it."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def read(self, stream: socket.socket) -> Iterator[list[Any]]:
        """One `recv`, and every frame that is whole after it. Raises EOFError when the other side is gone, and what
        `recv` raises."""
        try:
            data = stream.recv(READ_BYTES)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._unread += data
        while len(self._unread) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES], "big")
            if len(self._unread) < end:
                return
            body = bytes(self._unread[LENGTH_BYTES:end])
            del self._unread[:end]
            yield msgpack.unpackb(body)
