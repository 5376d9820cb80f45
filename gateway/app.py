"""The HTTP surface: which path is answered by what."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..engine.config import package_version
from .admin import Admin
from .api.description import describe_api
from .api.errors import ApiError, failed, model_not_found, unavailable
from .api.parsing import parse_chat, parse_completion
from .api.tokenizing import detokenize, tokenize
from .generate import Frontend, Generate
from .metrics import Report, printable
from .models import Models
from .pool import Pool
from .tokenize_endpoints import TextEndpoint, Turns
from .worker import Worker

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def reports(pool: Pool) -> Iterable[Report]:
    """What every worker has counted."""
    for worker in pool.workers.values():
        if worker.heartbeat is not None:
            labels = {"worker": worker.name, "role": worker.register.role, "model": worker.model}
            yield Report(labels, [family for family in worker.heartbeat.metrics if printable(family)])


@dataclass(frozen=True)
class App:
    """Everything behind the routes."""

    pool: Pool
    frontend: Frontend
    started_at: int
    debug_endpoints: bool = False

    @property
    def models(self) -> Models:
        return self.frontend.models

    def build(self) -> ASGIApp:
        turns = Turns()
        app = FastAPI(
            title="pdserve",
            openapi_url=None,  # requests are validated, and described, by our own schemas, for OpenAI's error shape
            routes=[
                Route("/v1/chat/completions", Generate(self.frontend, parse_chat), methods=["POST"]),
                Route("/v1/completions", Generate(self.frontend, parse_completion), methods=["POST"]),
                Route("/tokenize", TextEndpoint(self.frontend, tokenize, turns), methods=["POST"]),
                Route("/detokenize", TextEndpoint(self.frontend, detokenize, turns), methods=["POST"]),
                Route("/v1/models", self.list_models),
                Route("/v1/models/{name:path}", self.show_model),
                Route("/health", self.health),
                Route("/ready", self.ready),
                Route("/version", self.version),
                Route("/openapi.json", self.description),
                Route("/metrics", self.metrics),
                Route("/pools", self.pools),
                *Admin(self.pool, self.frontend.live, self.models).routes(debug=self.debug_endpoints),
            ],
            exception_handlers={HTTPException: on_http_exception, ApiError: on_api_error, Exception: on_fault},
        )
        return app

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        """Can any model be served? With `?model=NAME`: can that one, or for an alias every one that has a weight?"""
        ready, name = self.models.ready, request.query_params.get("model")
        if name is None:
            if not ready:
                raise unavailable("No set of workers that could serve is up.", "no_worker")
        else:
            wanted = self.models.behind(name)
            if not wanted:
                raise model_not_found(name)
            if missing := [model.name for model in wanted if model.name not in ready]:
                raise unavailable(f"No worker that could serve {missing[0]!r:.200} is up.", "no_worker")
        return JSONResponse({"status": "ready", "models": ready})

    async def version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": package_version()})

    async def description(self, _: HttpRequest) -> Response:
        return JSONResponse(describe_api(package_version()))

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self.frontend.metrics.page(), media_type=METRICS_TYPE)

    async def list_models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.models.names]})

    async def show_model(self, request: HttpRequest) -> Response:
        name: str = request.path_params["name"]
        if name not in self.models.names:
            raise model_not_found(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        """For an alias: the files of the model that most requests go to, and the length that each one takes."""
        models = self.models.behind(name)
        lengths = [m.limits(()).max_model_len for m in models if any(self.pool.by_role("decode", m.name))]
        return {
            "id": name,
            "object": "model",
            "created": self.started_at,
            "owned_by": "pdserve",
            "root": models[0].identity.path,
            "max_model_len": min(lengths, default=None),
        }

    async def pools(self, _: HttpRequest) -> Response:
        now = time.monotonic()
        workers = sorted(self.pool.workers.values(), key=lambda w: (w.register.role, w.name))
        return JSONResponse(
            {
                "gateway": self.pool.gateway_id,
                "control_address": self.pool.address,
                "queued": sum(len(model.dispatcher.queue) for model in self.models.served.values()),
                "aliases": {alias.name: dict(alias.weights) for alias in self.models.aliases.values()},
                "workers": [describe(worker, now) for worker in workers],
            }
        )


def describe(worker: Worker, now: float) -> dict[str, Any]:
    """One worker as `/pools` shows it."""
    register, beat = worker.register, worker.heartbeat
    described: dict[str, Any] = {
        "id": worker.id,
        "name": worker.name,
        "role": register.role,
        "model": register.model,
        "state": worker.state,
        "pid": register.pid,
        "host": register.host,
        "addresses": {"bulk": register.bulk_address, "control": register.peer_address},
        "dtype": register.layout.dtype,
        "block_size": register.block_size,
        "max_model_len": register.max_model_len,
        "max_sequences": register.max_sequences,
        "registered_s": round(now - worker.registered_at, 3),
        "last_heard_s": round(now - worker.last_heard, 3),
        "blocks": {"total": register.num_blocks},
        "load": {"inflight": len(worker.legs)},
        "links": [asdict(link) for link in worker.links()],
    }
    if beat is not None:
        described["blocks"] |= {"free": beat.free_blocks, "held": beat.held_blocks}
        described["load"] |= {
            "running": beat.running,
            "waiting": beat.waiting,
            "queued_tokens": beat.queued_tokens,
        }
    return described


def _answer(error: ApiError) -> Response:
    return Response(json.dumps(error.body()), error.status, error.headers, "application/json")


async def on_api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(error)


async def on_http_exception(request: HttpRequest, error: Exception) -> Response:
    """404 and 405 of the routing."""
    assert isinstance(error, HTTPException)
    text = {
        404: f"There is nothing at {request.url.path:.200}.",
        405: f"{request.method} is not possible at {request.url.path:.200}.",
    }.get(error.status_code, error.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return _answer(ApiError(error.status_code, text, code=code, headers=error.headers))


async def on_fault(_: HttpRequest, error: Exception) -> Response:
    """Ours. The server logs the traceback."""
    return _answer(failed("Internal error of the gateway.", "internal_error"))
