"""One line for every request: who asked for what, how it ended, and how long it took. Never what was said, unless
`--log-prompts` asks for the prompts.

Probes (/health and the like) are logged at DEBUG, all else at INFO.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine.config import LogEvent
from ..engine.lifetime import Lifetime
from .api.parsed_request import ParsedRequest
from .api_keys import client_of
from .asgi import REQUEST_ID_STATE
from .reply import Reply

log = logging.getLogger("pdserve.requests")

RECORD_STATE = "record"  # in the ASGI scope's state
PROBES = frozenset({"/health", "/ready", "/metrics", "/pools", "/version"})
CLIENT_GONE = 499  # where the client left before there was a status
MAX_CHARS = 200  # of a name that the client chose
MAX_PROMPT_TOKENS = 16384  # of each prompt, with --log-prompts


@dataclass
class RequestRecord:
    """What the endpoints add to their request's line."""

    wants_prompts: bool = False
    fields: dict[str, object] = field(default_factory=dict)

    def note_parsed(self, parsed: ParsedRequest) -> None:
        self.fields |= {"model": parsed.model[:MAX_CHARS], "stream": parsed.stream}
        self.fields["prompt_tokens"] = parsed.prompt_tokens

    def note_prompts(self, prompts: Sequence[str]) -> None:
        self.fields["prompts"] = list(prompts)

    def note_reply(self, reply: Reply) -> None:
        """How far the answer got: choices that were cut off have no finish reason."""
        usage = reply.usage()
        self.fields |= {"completion_tokens": usage.completion_tokens, "cached_tokens": usage.cached_tokens}
        self.fields["finish_reasons"] = ",".join(finish or "none" for finish in reply.finishes)

    def note_end(self, lifetime: Lifetime, outcome: str) -> None:
        self.fields["outcome"] = outcome
        for name, seconds in (("queue_s", lifetime.queue_s), ("ttft_s", lifetime.ttft_s)):
            if seconds is not None:
                self.fields[name] = round(seconds, 4)


def record_of(scope: Scope) -> RequestRecord:
    """The request's record, which `RequestLog` made."""
    record: RequestRecord = scope["state"][RECORD_STATE]
    return record


class RequestLog:
    """Writes the line when the request is over, however it ended."""

    def __init__(self, app: ASGIApp, log_prompts: bool) -> None:
        self._app = app
        self._log_prompts = log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope["state"][RECORD_STATE] = RequestRecord(self._log_prompts)
        status = CLIENT_GONE
        came_at = time.monotonic()

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_status)
        finally:
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            line = {
                "id": scope["state"][REQUEST_ID_STATE],
                "client": client_of(scope),
                "endpoint": f"{scope['method']} {scope['path'][:MAX_CHARS]}",
                "status": status,
                **record.fields,
                "e2e_s": round(time.monotonic() - came_at, 4),
            }
            log.log(level, LogEvent("request", line))
