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
from pdserve.gateway.membership import ModelIdentity
from pdserve.gateway.model_flags import ModelSource
from pdserve.gateway.server import LoadedModel, Server, build_app, eos_token_ids, http_server
from tests.gateway.fake_worker import FINGERPRINT, MODEL
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
        """Sum over the series of that name that have all labels given with it: `name{label="value"}`."""
        name, _, labels = name.rstrip("}").partition("{")
        page = (await self.client.get("/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith((name + "{", name + " "))]
        found = [line for line in lines if all(label in line for label in labels.split(","))]
        assert found, f"no series {name} with {labels}"
        return sum(float(line.split()[-1]) for line in found)

    def text_of(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@contextlib.asynccontextmanager
async def running_site(
    directory: Path, model_dir: Path, text: Tokenizer, *others: LoadedModel, **options: Any
) -> AsyncIterator[Site]:
    """`others` are models beside the one that tests use when there is but one; `options` are fields of the gateway's
    config."""
    loaded = [LoadedModel(ModelIdentity(MODEL, str(model_dir), FINGERPRINT), text, eos_token_ids(model_dir)), *others]
    identities = [model.identity for model in loaded]
    config = GatewayConfig(tuple(ModelSource(model.name, model.path) for model in identities), **options)
    async with running_system(directory, models=identities) as system:
        with ThreadPoolExecutor(1) as threads:
            app, _ = build_app(config, loaded, system.pool, threads)
            listener = bind("127.0.0.1", 0)
            port = listener.getsockname()[1]
            server = http_server(app, config.shutdown_s)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
                await until(lambda: server.started)
                yield Site(system, server, serving, client, port, text)
            server.request_stop()
            await serving
