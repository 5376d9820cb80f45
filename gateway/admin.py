"""For operators: POST /admin/drain/{worker} and /admin/aliases/{name}; GET /debug/requests where it is switched on.

Only a client on this machine may ask, or one with an API key named `admin`. Where API keys are on, one is needed in
either case: who passes here has passed that door. The body must be declared as JSON, which no page of another site can
make a browser send here unasked.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .aliases import BadWeights
from .api.errors import ApiError, invalid
from .api.json_body import load_object
from .api_keys import client_of
from .asgi import Bodies, ClientGone
from .models import Models
from .pool import Pool
from .request import Request
from .worker import Worker

ADMIN_CLIENT = "key:admin"
MAX_BODY_BYTES = 64 * 1024


@dataclass
class LiveRequests:
    """Every request this gateway is at work on, with its HTTP request's id and when it came (loop time)."""

    entries: dict[Request, tuple[str, float]] = field(default_factory=dict)

    def add(self, requests: Iterable[Request], http_id: str) -> None:
        now = asyncio.get_running_loop().time()
        self.entries.update((request, (http_id, now)) for request in requests)

    def remove(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.entries.pop(request, None)


def require_operator(request: HttpRequest) -> None:
    """Raise ApiError 403 unless the client may steer this system."""
    client = client_of(request.scope)
    host = request.client.host if request.client else ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and client != ADMIN_CLIENT:
        text = "Only a client on the gateway's machine, or one with the API key `admin`, may do this."
        raise ApiError(403, text, code="forbidden")


def require_json(request: HttpRequest) -> None:
    """Raise ApiError 415 unless the body is declared as JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "The request must be declared as application/json.", code="unsupported_media_type")


@dataclass(frozen=True)
class Admin:
    pool: Pool
    live: LiveRequests
    models: Models
    bodies: Bodies = field(default_factory=lambda: Bodies(MAX_BODY_BYTES))

    def routes(self, *, debug: bool) -> list[Route]:
        routes = [
            Route("/admin/drain/{name}", self.drain, methods=["POST"]),
            Route("/admin/aliases/{name:path}", self.weigh, methods=["POST"]),
        ]
        return routes + ([Route("/debug/requests", self.requests)] if debug else [])

    async def drain(self, request: HttpRequest) -> Response:
        """Have a worker (by name, or by full id) take nothing new and leave. Asking again changes nothing."""
        require_operator(request)
        require_json(request)
        name: str = request.path_params["name"]
        worker = next((w for w in self.pool.workers.values() if name in (w.name, w.id)), None)
        if worker is None:
            known = ", ".join(sorted(w.name for w in self.pool.workers.values())) or "none"
            raise ApiError(404, f"There is no worker {name!r:.200} here; registered: {known}.", code="worker_not_found")
        self.pool.dismiss(worker)
        return JSONResponse({"worker": worker.id, "state": worker.state, "inflight": len(worker.legs)}, 202)

    async def weigh(self, request: HttpRequest) -> Response:
        """Set the weights of an alias, all of them: `{"v1": 90, "v2": 10}`. Requests under way stay where they are."""
        require_operator(request)
        require_json(request)
        name: str = request.path_params["name"]
        if name not in self.models.aliases:
            known = ", ".join(self.models.aliases) or "none"
            raise ApiError(404, f"There is no alias {name!r:.200} here; there are: {known}.", code="alias_not_found")
        try:
            weights = load_object(await self.bodies.read(request.scope, request.receive))
            alias = self.models.set_weights(name, weights)
        except BadWeights as error:
            raise invalid(f"{error}.", None) from None
        except ClientGone:
            raise invalid("The client closed its connection.", None) from None
        return JSONResponse({"alias": alias.name, "weights": alias.weights})

    async def requests(self, request: HttpRequest) -> Response:
        """Every live request: what it waits for, and who holds what of it."""
        require_operator(request)
        now = asyncio.get_running_loop().time()
        holders: dict[str, list[Worker]] = {}
        for worker in self.pool.workers.values():
            for name in worker.legs:
                holders.setdefault(name, []).append(worker)
        return JSONResponse(
            {
                "gateway": self.pool.gateway_id,
                "requests": [
                    {"http_id": http_id, "age_s": round(now - since, 3), **describe(live, holders.get(live.id, []))}
                    for live, (http_id, since) in self.live.entries.items()
                ],
            }
        )


def describe(request: Request, holders: Iterable[Worker]) -> dict[str, Any]:
    """One request as /debug/requests shows it: counts, never what was said."""
    outputs = [len(choice.accepted) for choice in request.choices]
    return {
        "id": request.id,
        "model": request.model,
        "state": request.state.value,
        "prefill": request.choice and {"where": request.choice.where, "reason": request.choice.reason},
        "attempt": request.attempt,
        "prompt_tokens": len(request.job.prompt),
        "output_tokens": outputs,
        "unfinished_choices": sum(not choice.ended_by for choice in request.choices),
        "max_tokens": request.job.params.max_tokens,
        "priority": request.job.priority,
        "holders": [_describe_leg(worker, request) for worker in holders],
    }


def _describe_leg(worker: Worker, request: Request) -> dict[str, Any]:
    """`blocks`: about how many the sequences it has there fill; what is shared with others is counted, too."""
    leg = worker.legs[request.id]
    prompt, block_size = len(request.job.prompt), worker.register.block_size
    open_choices = [choice for choice in request.choices if not choice.ended_by]
    tokens = prompt + sum(len(choice.accepted) for choice in open_choices)
    return {
        "worker": worker.id,
        "role": worker.register.role,
        "attempt": leg.attempt,
        "sent": leg.sent_at_seq is not None,
        "unlisted_heartbeats": leg.unlisted,
        "moving": leg.moving,
        "pending_tokens": leg.pending_tokens,
        "tokens": tokens,
        "blocks": -(-tokens // block_size),
    }
