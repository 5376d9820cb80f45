"""What stands between the HTTP server and the routes, from the outside in: request id, request log, CORS, API keys,
limits of clients."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from .api_keys import ApiKey, ApiKeys
from .asgi import RequestIds
from .front_flags import FrontConfig
from .metrics import GatewayMetrics
from .rate_limit_gate import RATE_LIMIT_HEADERS, RateLimits
from .rate_limits import RateLimiter
from .request_log import RequestLog

log = logging.getLogger(__name__)

EXPOSED_HEADERS = ("x-request-id", *RATE_LIMIT_HEADERS, "retry-after", "retry-after-ms")


def in_front(
    app: ASGIApp, keys: Mapping[bytes, ApiKey] | None, config: FrontConfig, metrics: GatewayMetrics
) -> ASGIApp:
    """`app` with everything in front of it that the flags ask for. `keys` None lets everybody in."""
    if config.log_prompts:
        log.warning("--log-prompts: THE LOG HOLDS WHAT CLIENTS SEND. Whoever can read it can read their prompts.")
    of_clients = {f"key:{key.name}": replace(config.limits, **key.limits) for key in (keys or {}).values()}
    if any(limits.in_force for limits in (config.limits, *of_clients.values())):
        app = RateLimits(app, RateLimiter(metrics.count_rate_limited), config.limits, of_clients)
    if keys is not None:
        app = ApiKeys(app, keys)
    if config.cors_origins:
        cors: dict[str, Any] = {"allow_methods": ("GET", "POST"), "allow_headers": ("*",)}
        app = CORSMiddleware(app, config.cors_origins, expose_headers=EXPOSED_HEADERS, **cors)
    return RequestIds(RequestLog(app, config.log_prompts))
