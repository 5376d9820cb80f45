"""POST /tokenize and /detokenize: work for a thread, and never for all of them, so that requests still get parsed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from .api.errors import ApiError, unavailable
from .api.parsed_request import ModelLimits
from .api.text import Tokenizer
from .api_keys import client_of
from .asgi import ClientGone, Responder
from .generate import Frontend
from .models import Caller

log = logging.getLogger(__name__)

MAX_WAITING = 64

Answer = Callable[[bytes, Tokenizer, ModelLimits], bytes]


class Turns:
    """One at a time, the others wait in line, and no more than `max_waiting` of them."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._waiting = 0
        self._one = asyncio.Semaphore(1)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Raises ApiError 503 when too many wait already."""
        if self._waiting >= self._max_waiting:
            raise unavailable(f"{self._waiting} requests to tokenise wait already.", "overloaded")
        self._waiting += 1
        try:
            await self._one.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._one.release()


class TextEndpoint:
    """One of the two endpoints, as an ASGI application. Both share their `turns`."""

    def __init__(self, frontend: Frontend, answer: Answer, turns: Turns) -> None:
        self._frontend = frontend
        self._answer = answer
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        frontend = self._frontend
        responder = Responder(scope, send)
        try:
            body = await frontend.bodies.read(scope, receive)
            async with self._turns.turn():
                caller = Caller(client_of(scope), responder.request_id)
                _, answer = await frontend.models.parse(frontend.threads, body, caller, self._answer)
            await responder.json(200, answer)
        except ApiError as error:
            await responder.fail(error)
        except ClientGone:
            log.info("%s: the client closed its connection", responder.request_id)
