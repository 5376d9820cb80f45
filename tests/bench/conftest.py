"""A small completions server whose behaviour each test scripts."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def chunk(token_ids: Sequence[int] | None, finish: str | None = None, text: str = "x") -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    if token_ids is not None:
        choice["token_ids"] = list(token_ids)
    return b"data: " + json.dumps({"object": "text_completion", "choices": [choice]}).encode() + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> bytes:
    counts = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


async def stream(request: web.Request, parts: Sequence[bytes | float]) -> web.StreamResponse:
    """Answer with an event stream: bytes are written, numbers are seconds to wait."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        if isinstance(part, bytes):
            await response.write(part)
        else:
            await asyncio.sleep(part)
    return response


def complete(first_after_s: float = 0.0, gap_s: float = 0.0) -> Behaviour:
    """A server that gives every request all its tokens, one a chunk."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        num_tokens = body["max_tokens"]
        parts: list[bytes | float] = [first_after_s]
        for index in range(num_tokens):
            last = index == num_tokens - 1
            parts += [chunk([index], "length" if last else None), 0.0 if last else gap_s]
        return await stream(request, [*parts, usage(len(body["prompt"]), num_tokens), b"data: [DONE]\n\n"])

    return behave


@dataclass
class FakeServer:
    """`behaviours` are used in order, the last one for ever; `bodies` is what arrived."""

    url: str = ""
    behaviours: list[Behaviour] = field(default_factory=lambda: [complete()])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    max_model_len: int | None = 4096

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        return await self.behaviours[min(len(self.bodies), len(self.behaviours)) - 1](request, body)

    async def models(self, request: web.Request) -> web.Response:
        entry = {"id": "tiny", "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [entry]})


@asynccontextmanager
async def serving() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.post("/v1/completions", fake.completions), web.get("/v1/models", fake.models)])
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    fake.url = f"http://127.0.0.1:{port}"
    yield fake
    await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with serving() as fake:
        yield fake


@pytest.fixture
async def other_server() -> AsyncIterator[FakeServer]:
    async with serving() as fake:
        yield fake


class Script:
    """The building blocks above, for tests (a conftest cannot be imported from)."""

    chunk = staticmethod(chunk)
    usage = staticmethod(usage)
    stream = staticmethod(stream)
    complete = staticmethod(complete)


@pytest.fixture
def script() -> type[Script]:
    return Script


@pytest.fixture
def unused_port() -> int:
    """A port nothing listens on (bound and released a moment ago)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
