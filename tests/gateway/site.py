"""A whole gateway in this process: a real HTTP server, with fake workers behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pdserve.gateway.api.text import Tokenizer
from pdserve.gateway.config import GatewayConfig
from pdserve.gateway.listener import bind
from pdserve.gateway.server import Server, build_app, http_server
from tests.gateway.fake_worker import MODEL
from tests.gateway.harness import System, running_system, until


@dataclass
class Site:
    """A gateway with its HTTP server, in this process."""

    system: System
    server: Server
    serving: asyncio.Task[None]
    client: httpx.AsyncClient
    port: int
    tokenizer: Tokenizer

    async def metric(self, name: str) -> float:
        page = (await self.client.get("/metrics")).text
        return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name + " "))

    def text_of(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@contextlib.asynccontextmanager
async def running_site(directory: Path, model_dir: Path, text: Tokenizer, **options: Any) -> AsyncIterator[Site]:
    """`options` are fields of the gateway's config."""
    config = GatewayConfig(model="m", names=(MODEL,), **options)
    async with running_system(directory) as system:
        object.__setattr__(system.pool._identity, "path", str(model_dir))
        with ThreadPoolExecutor(1) as threads:
            app = build_app(config, system.pool._identity, system.pool, text, threads)
            listener = bind("127.0.0.1", 0)
            port = listener.getsockname()[1]
            server = http_server(app, config.shutdown_s)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
                await until(lambda: server.started)
                yield Site(system, server, serving, client, port, text)
            server.request_stop()
            await serving
