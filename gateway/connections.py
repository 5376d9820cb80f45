"""Limits on what a client's connection may cost, before and beside any request: how many there are, the size of a
request's head, and how long a head, an unread response, or an unwanted body may take.

Every refusal here is an answer in OpenAI's error shape, after which the connection is closed.
"""

from __future__ import annotations

import asyncio
import http
import json
import logging
import resource
import secrets
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

from .api.errors import ApiError
from .asgi import AbortableProtocol

GOODBYE_S = 1.0  # how long a refused client may be silent before its connection is cut
LEAVING_S = 30.0  # how long it may go on sending what is not wanted
SEND_BUFFER_BYTES = 256 * 1024
STALLED_S = 60
OTHER_OPEN_FILES = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int = 4096
    max_head_bytes: int = 64 * 1024
    head_timeout_s: float = 20.0  # from the first byte of a request, or from connecting, to the end of its head
    max_unwanted_bytes: int = 256 * 1024 * 1024  # of a refused client, taken and thrown away


@dataclass
class Connections:
    """What the connections of one server share."""

    limits: ConnectionLimits
    leaving: set[LimitedProtocol] = field(default_factory=set)  # were refused, and may read why


class HeadTooLarge(Exception):
    """Raised within the parser to make it stop."""


class LimitedProtocol(AbortableProtocol):
    """uvicorn's HTTP protocol with limits."""

    def __init__(self, shared: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self._shared = shared
        self._limits = shared.limits
        self._refused = False
        self._in_head = True
        self._head_bytes = 0  # arrived since the head began: one header without an end is never parsed
        self._parsed_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._cut_by = 0.0  # a refused client's connection, on the loop's clock, whatever it does
        self._heard_at = 0.0
        self._unwanted_bytes = 0

    # --- connecting and leaving ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            text = f"The server has {self._limits.max_connections} connections open already."
            headers = {"Retry-After": "1"}
            self._refuse(ApiError(503, text, type="server_error", code="too_many_connections", headers=headers))
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._shared.leaving.discard(self)
        super().connection_lost(exc)

    def _refuse(self, error: ApiError) -> None:
        """Answer without an application, and end the connection."""
        self._stop_head_timer()
        if self._responding or len(self._shared.leaving) >= self._limits.max_connections:
            self._refused = True
            self.transport.abort()
            return
        body = json.dumps(error.body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers["x-request-id"] = secrets.token_hex(16)
        lines = [f"{name}: {value}\r\n" for name, value in {**headers, **error.headers}.items()]
        status = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
        self.transport.write((status + "".join(lines) + "\r\n").encode("ascii") + body)
        self._leave()

    def _leave(self) -> None:
        """Close, but let the client read what was sent. Most clients read only when they have sent all, and what lies
        here unread makes closing throw the answer away: so the rest is taken, within bounds, and dropped."""
        self._refused = True
        self.connections.discard(self)
        self._shared.leaving.add(self)
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._heard_at = self.loop.time()
        self._cut_by = self._heard_at + LEAVING_S
        self._cut_when_silent()

    def _cut_when_silent(self) -> None:
        cut_at = min(self._heard_at + GOODBYE_S, self._cut_by)
        if self.loop.time() >= cut_at:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.loop.call_at(cut_at, self._cut_when_silent)

    def _take_unwanted(self, num_bytes: int) -> None:
        self._heard_at = self.loop.time()
        self._unwanted_bytes += num_bytes
        if self._unwanted_bytes > self._limits.max_unwanted_bytes:
            self.flow.pause_reading()

    @property
    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # --- the head of a request -----------------------------------------------------------------------------------

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(ApiError(408, "The head of the request took too long.", code="request_timeout"))

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._take_unwanted(len(data))
            return
        if not self._responding:
            self._start_head_timer()
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.max_head_bytes and not self._refused:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._parsed_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._parsed(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._parsed(len(name) + len(value) + len(": \r\n"))

    def _parsed(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > self._limits.max_head_bytes:
            self._head_bytes = self._parsed_bytes
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser cannot go on."""
        if self._head_bytes > self._limits.max_head_bytes:
            text = f"The head of the request is larger than {self._limits.max_head_bytes} bytes."
            self._refuse(ApiError(431, text, code="headers_too_large"))
        else:
            self._refuse(ApiError(400, "This is not a valid HTTP request.", code="invalid_http"))

    # --- after the response --------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self._refused:
            return
        if self.cycle.response_complete and self.cycle.more_body:
            self._leave()  # answered before all of its body was here: the rest is not wanted
        elif self._in_head:
            self._start_head_timer()  # the next request has begun already


def bound_unread_responses(listener: socket.socket, stalled_s: float = STALLED_S) -> None:
    """Have the kernel keep little of what a client does not read, and end a connection whose client reads nothing at
    all for `stalled_s`. Accepted connections inherit both."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stalled_s * 1000))


def allow_open_files(max_connections: int) -> None:
    """Raise this process's limit of open files as far as it may, for that many connections and everything else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OTHER_OPEN_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning("only %d files may be open: fewer than --max-connections %d needs", allowed, max_connections)
