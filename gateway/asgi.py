"""Between ASGI and the rest: bodies in, responses out, errors in OpenAI's shape, a request id on everything."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .api.errors import ApiError
from .api.responses import CONTENT_TYPE_STREAM, KEEP_ALIVE, error_event
from .reply import EventBuffer

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")
REQUEST_ID_STATE = "request_id"  # in the ASGI scope's state: what logs call the request
ABORT = "pdserve.abort"  # ASGI extension: cut the connection, whatever is still unsent
JSON_TYPES = ("application/json", "text/json")


class ClientGone(Exception):
    """The client closed its connection."""


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


class Bodies:
    """Reads request bodies, each within bounds of size and time, all of them within a bound of memory."""

    def __init__(
        self,
        max_bytes: int,
        max_total_bytes: int = 1024 * 1024 * 1024,
        idle_timeout_s: float = 20.0,
        total_timeout_s: float = 300.0,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_total_bytes = max(max_total_bytes, max_bytes)
        self._idle_timeout_s = idle_timeout_s
        self._total_timeout_s = total_timeout_s
        self._reading_bytes = 0  # of all bodies that are not complete yet

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises ApiError 408, 413, 415 or 503, or ClientGone."""
        content_type = (header(scope, b"content-type") or b"application/json").decode("latin-1")
        media_type = content_type.partition(";")[0].strip().lower()
        if media_type not in JSON_TYPES and not media_type.endswith("+json"):
            text = f"Send the body as JSON, with the header Content-Type: application/json (not {media_type:.100})."
            raise ApiError(415, text, code="unsupported_media_type")
        length = header(scope, b"content-length") or b"0"
        if length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._total_timeout_s):
                while await self._read_more(receive, body):
                    continue
        except TimeoutError:
            raise ApiError(408, "The body of the request took too long.", code="request_timeout") from None
        finally:
            self._reading_bytes -= len(body)
        return bytes(body)

    async def _read_more(self, receive: Receive, body: bytearray) -> bool:
        """Take in what comes next. False at the end."""
        async with asyncio.timeout(self._idle_timeout_s):
            message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        if len(body) + len(part) > self._max_bytes:
            raise self._too_large()
        if self._reading_bytes + len(part) > self._max_total_bytes:
            text = "The server is receiving too many large requests at once."
            raise ApiError(503, text, type="server_error", code="overloaded", headers={"Retry-After": "1"})
        body += part
        self._reading_bytes += len(part)
        more: bool = message.get("more_body", False)
        return more

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_bytes} bytes.", code="request_too_large")


class Responder:
    """One HTTP response: a body, or a stream, or an error in whichever of the two has begun."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.started = False
        self.ended = False  # the last message was handed to the server

    @property
    def request_id(self) -> str:
        """What logs call the request."""
        found: str = self._scope["state"][REQUEST_ID_STATE]
        return found

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _end(self, body: bytes) -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def until_disconnect(self, receive: Receive) -> None:
        """Raise ClientGone when the client closes its connection before the response has ended."""
        while (await receive())["type"] != "http.disconnect":
            continue
        if not self.ended:  # after the end the server says "disconnect", too
            raise ClientGone

    async def json(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        await self._start(
            status,
            [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *((key.lower().encode(), value.encode()) for key, value in (headers or {}).items()),
            ],
        )
        await self._end(body)

    async def stream(self, events: EventBuffer, keep_alive_s: float, begun: Callable[[], bool]) -> None:
        """Send events as they come, until the buffer is closed. Headers go out with the first one: until then a
        refusal can still be a status code. Where none comes for `keep_alive_s` a comment is sent, once the request
        has `begun`: a client, or a proxy before it, is not to take a long prompt for a dead connection."""
        while data := await self._next(events, keep_alive_s, begun):
            if not self.started:
                await self._start(
                    200, [(b"content-type", CONTENT_TYPE_STREAM.encode()), (b"cache-control", b"no-cache")]
                )
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self._end(b"")

    async def _next(self, events: EventBuffer, keep_alive_s: float, begun: Callable[[], bool]) -> bytes:
        while True:
            try:
                async with asyncio.timeout(keep_alive_s):
                    return await events.take()
            except TimeoutError:
                if self.started or begun():
                    return KEEP_ALIVE

    async def fail(self, error: ApiError, unsent: bytes = b"") -> None:
        """The error as the whole response, or as the last event after `unsent` ones."""
        if self.ended:
            return
        if not self.started:
            await self.json(error.status, json.dumps(error.body()).encode(), error.headers)
        else:
            await self._end(unsent + error_event(error))

    async def abort(self) -> None:
        """Cut the connection now; what the client has not read is dropped."""
        extension = self._scope.get("extensions", {}).get(ABORT)
        if extension is not None:
            extension["abort"]()
            await asyncio.sleep(0)  # a turn for the server to take note, or it misses the end of the response


class RequestIds:
    """Every response carries x-request-id: the client's own when it sent a usable one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = header(scope, b"x-request-id") or b""
        if REQUEST_ID.fullmatch(request_id) is None:
            request_id = secrets.token_hex(16).encode()
        scope.setdefault("state", {})[REQUEST_ID_STATE] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


LAST_REQUEST_GRACE_S = 0.5


class AbortableProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which also lets the application cut a connection: closing one waits for its reader.

    When the server stops, uvicorn closes connections without a request at once. But a request may be on its way there,
    the first of a connection made a moment ago or the next of an older one; it was not refused, so it is answered.
    """

    _stopping = False

    def shutdown(self) -> None:
        """The server stops: close the connection after the answer that is due, or that comes to be due in a moment."""
        self._stopping = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LAST_REQUEST_GRACE_S, super().shutdown)
        else:
            super().shutdown()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._stopping and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, dict[object, Any]] = {ABORT: {"abort": self.transport.abort}}
        self.scope["extensions"] = extensions
