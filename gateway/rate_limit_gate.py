"""Where the limits of a client meet its requests: before their bodies are read, let alone tokenised."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api.errors import ApiError
from .api_keys import client_of
from .asgi import Responder
from .rate_limits import ClientLimits, RateLimiter, Ticket

TICKET_STATE = "ticket"  # in the ASGI scope's state
FREE_PREFIX = "/admin/"
NETWORK_OF_ONE_HOST = 64  # bits of an IPv6 address: one client has all the rest to choose from
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


def ticket_of(scope: Scope) -> Ticket:
    """The request's ticket; one that counts nothing where no limit is in force."""
    ticket: Ticket | None = scope["state"].get(TICKET_STATE)
    return ticket or Ticket(None)


def account_name(client: str) -> str:
    """Whom the limits apply to: the key, or the address (of IPv6 its network)."""
    kind, _, address = client.partition(":")
    if kind != "ip" or ":" not in address:
        return client
    try:
        return f"ip:{ipaddress.ip_network((address, NETWORK_OF_ONE_HOST), strict=False)}"
    except ValueError:  # with a scope, as in fe80::1%eth0
        return client


class RateLimits:
    """Holds every request that asks for work (POST, but for the operator's) to its client's limits."""

    def __init__(
        self, app: ASGIApp, limiter: RateLimiter, defaults: ClientLimits, of_clients: Mapping[str, ClientLimits]
    ) -> None:
        self._app = app
        self._limiter = limiter
        self._defaults = defaults
        self._of_clients = dict(of_clients)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._limits(scope)
        if not limits.in_force:
            await self._app(scope, receive, send)
            return
        account = self._limiter.account(account_name(client_of(scope)), limits)

        ticket = Ticket(None)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.encode(), value.encode()) for name, value in account.headers().items()]
                message["headers"] = [*message.get("headers", ()), *headers]
            elif not message.get("more_body", False):
                ticket.leave()  # before the client has the end, at which it may come with the next one
            await send(message)

        try:
            ticket = account.enter()
        except ApiError as error:
            await Responder(scope, send_with_headers).fail(error)
            return
        scope["state"][TICKET_STATE] = ticket
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            ticket.leave()

    def _limits(self, scope: Scope) -> ClientLimits:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].startswith(FREE_PREFIX):
            return ClientLimits()
        return self._of_clients.get(client_of(scope), self._defaults)
