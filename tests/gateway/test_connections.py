"""What a client's connection may cost: number, heads, bodies, time, unread bytes. Over a real server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from pdserve.gateway import connections
from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.asgi import Bodies, ClientGone, Responder
from pdserve.gateway.connections import ConnectionLimits
from pdserve.gateway.listener import bind
from pdserve.gateway.server import Server, http_server
from tests.gateway.harness import until

LIMITS = ConnectionLimits(max_connections=5, max_head_bytes=8192, head_timeout_s=0.3, max_unwanted_bytes=2_000_000)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
MOST_BUFFERED_BYTES = 32_000_000  # between two ends that do not read: kernels let their buffers grow to several MB each


@dataclass
class EchoSize:
    """Answers a body's size; GET /flood streams without end."""

    bodies: Bodies = field(default_factory=lambda: Bodies(100_000, idle_timeout_s=0.3, total_timeout_s=2.0))
    sent_bytes: int = 0
    aborted: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        responder = Responder(scope, send)
        if scope["path"] == "/flood":
            await self._flood(send, receive)
            return
        try:
            body = await self.bodies.read(scope, receive) if scope["method"] == "POST" else b""
        except ApiError as error:
            await responder.fail(error)
        except ClientGone:
            return
        else:
            await responder.json(200, str(len(body)).encode())

    async def _flood(self, send: Send, receive: Receive) -> None:
        await receive()  # the empty body
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue

        watching = asyncio.create_task(watch())
        while not watching.done():
            sending = asyncio.create_task(send({"type": "http.response.body", "body": b"x" * 16384, "more_body": True}))
            await asyncio.wait([sending, watching], return_when=asyncio.FIRST_COMPLETED)
            self.sent_bytes += 16384
        self.aborted = True


@dataclass
class Site:
    port: int
    app: EchoSize
    server: Server
    client: httpx.AsyncClient

    async def raw(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def answer(self, data: bytes) -> tuple[int, Any]:
        """Status and body of what comes back until the server closes the connection."""
        reader, writer = await self.raw(data)
        async with asyncio.timeout(30):
            reply = await reader.read()
        writer.close()
        head, _, body = reply.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)


async def push_until_cut(writer: asyncio.StreamWriter, piece: bytes) -> int:
    """Send without end. Returns how many bytes were taken before the server cut the connection."""
    sent = 0
    async with asyncio.timeout(60):
        try:
            while True:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
                await asyncio.sleep(0)
        except ConnectionError:
            return sent


@asynccontextmanager
async def running(limits: ConnectionLimits = LIMITS) -> AsyncIterator[Site]:
    app = EchoSize()
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = http_server(app, 1.0, limits)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=5, trust_env=False) as client:
        await until(lambda: server.started)
        yield Site(port, app, server, client)
    server.request_stop()
    await serving


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running() as site:
        yield site


async def test_requests_within_the_limits_are_answered(site: Site) -> None:
    headers = {"x-long": "y" * 7000}
    for size in (0, 1, 100_000):
        answer = await site.client.post("/", content=b"x" * size, headers=headers)
        assert (answer.status_code, answer.text) == (200, str(size))


@pytest.mark.parametrize(
    "head",
    [
        GET + b"x-long: " + b"y" * 9000 + b"\r\n\r\n",
        GET + b"".join(b"x-%d: y\r\n" % i for i in range(2000)) + b"\r\n",
        b"GET /" + b"y" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["one header", "many headers", "url"],
)
async def test_a_head_past_its_limit_is_a_431(site: Site, head: bytes) -> None:
    status, body = await site.answer(head)
    assert status == 431
    assert body["error"]["code"] == "headers_too_large"


async def test_one_header_without_an_end_is_cut_at_the_limit(site: Site) -> None:
    _, writer = await site.raw(GET + b"x-long: ")
    assert await push_until_cut(writer, b"y" * 4096) < MOST_BUFFERED_BYTES


async def test_a_refusal_before_any_request_has_an_id_too(site: Site) -> None:
    reader, _ = await site.raw(b"nonsense\r\n\r\n")
    async with asyncio.timeout(30):
        assert b"\r\nx-request-id: " in await reader.read()


async def test_what_is_not_http_is_a_400_in_openais_shape(site: Site) -> None:
    status, body = await site.answer(b"\x80\x04\x95 nonsense\r\n\r\n")
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("start", [b"", b"\r\n", b"GET / HT", GET])
async def test_a_head_that_does_not_come_to_an_end_is_a_408(site: Site, start: bytes) -> None:
    status, body = await site.answer(start)
    assert status == 408
    assert body["error"]["code"] == "request_timeout"


async def test_a_head_sent_drop_by_drop_is_a_408_although_each_drop_is_progress(site: Site) -> None:
    reader, writer = await site.raw()
    loop = asyncio.get_running_loop()
    started = loop.time()
    answered = asyncio.create_task(reader.read())
    for byte in GET + b"x-slow: " + b"y" * 200:
        if answered.done():
            break
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)
    assert (await answered).startswith(b"HTTP/1.1 408")
    assert loop.time() - started < 3
    writer.close()


async def test_the_time_limit_holds_for_the_second_request_of_a_connection_too(site: Site) -> None:
    for together in (True, False):
        reader, writer = await site.raw(GET + b"\r\n" + (GET if together else b""))
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
        if not together:
            writer.write(GET)
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_long_answer_is_not_cut_by_the_time_limit_of_heads(site: Site) -> None:
    async with site.client.stream("GET", "/flood") as answer:
        started = asyncio.get_running_loop().time()
        async for _ in answer.aiter_bytes():
            if asyncio.get_running_loop().time() - started > 3 * LIMITS.head_timeout_s:
                break
    assert answer.status_code == 200


async def test_a_body_that_stops_coming_is_a_408(site: Site) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    status, body = await site.answer(head + b"x")
    assert status == 408
    assert body["error"]["code"] == "request_timeout"


async def test_a_body_without_an_end_is_a_413_and_then_not_read_any_more(site: Site) -> None:
    reader, writer = await site.raw(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    answered = asyncio.create_task(reader.readuntil(b"\r\n"))
    assert await push_until_cut(writer, b"1000\r\n" + b"x" * 4096 + b"\r\n") < MOST_BUFFERED_BYTES
    assert (await answered).startswith(b"HTTP/1.1 413")


async def test_a_client_that_reads_only_when_it_has_sent_all_is_told_why() -> None:
    async with running(ConnectionLimits()) as site:
        answer = await site.client.post("/", content=b" " * 20_000_000)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


async def test_a_refused_client_may_not_send_for_ever(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    monkeypatch.setattr(connections, "LEAVING_S", 0.3)
    _, writer = await site.raw(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)

    async with asyncio.timeout(10):  # sooner than by the true limit
        await drip()


async def test_all_bodies_together_are_bounded() -> None:
    bodies = Bodies(1000, max_total_bytes=1500)
    scope = {"headers": []}
    going_on = asyncio.Event()

    def sender(size: int, hold: bool) -> Receive:
        messages = [{"type": "http.request", "body": b"x" * size, "more_body": True}, {"type": "http.request"}]

        async def receive() -> Any:
            if hold and len(messages) == 1:
                await going_on.wait()
            return messages.pop(0)

        return receive

    first = asyncio.create_task(bodies.read(scope, sender(1000, hold=True)))
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await bodies.read(scope, sender(1000, hold=False))
    assert refused.value.status == 503
    assert "Retry-After" in refused.value.headers
    going_on.set()
    assert len(await first) == 1000
    assert len(await bodies.read(scope, sender(1000, hold=False))) == 1000


async def test_connections_beyond_the_limit_get_a_503_and_the_others_go_on() -> None:
    async with running(dataclasses.replace(LIMITS, head_timeout_s=20.0)) as site:
        idle = [await site.raw(GET) for _ in range(LIMITS.max_connections)]
        await until(lambda: len(site.server.server_state.connections) == LIMITS.max_connections)
        status, body = await site.answer(GET + b"\r\n")
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        reader, writer = idle[0]
        writer.write(b"connection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        await until(lambda: len(site.server.server_state.connections) < LIMITS.max_connections)
        assert (await site.client.get("/")).status_code == 200  # a place is free again
        for _, writer in idle:
            writer.close()


async def test_a_flood_of_connections_leaves_nothing_behind(site: Site) -> None:
    crowd = await asyncio.gather(*(site.raw() for _ in range(100)))
    await until(lambda: len(site.server.server_state.connections) == 0, 10)  # those let in had their time, too
    for _, writer in crowd:
        writer.close()
    assert (await site.client.get("/")).status_code == 200


async def test_a_client_that_never_reads_is_ended_and_the_kernel_keeps_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the response, an unread one does not keep its connection for ever."""
    monkeypatch.setattr(connections.bound_unread_responses, "__defaults__", (0.5,))
    async with running() as site:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", site.port))
        await asyncio.get_running_loop().sock_sendall(raw, b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: site.app.aborted, 10)
        assert 0 < site.app.sent_bytes < 2_000_000
        raw.close()
