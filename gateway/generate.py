"""POST /v1/completions and /v1/chat/completions: one HTTP request from its first byte to its last.

1. The body is read; a thread validates, templates and tokenises it.
2. Each prompt becomes a `Request` in a task of its own. Beside them run the sender of the stream and a watch on the
   connection. Whatever ends one of them ends all, and only when all have let go the client is told.
3. The outcome is counted, whichever it was.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from starlette.types import Receive, Scope, Send

from ..engine.lifetime import Event, Lifetime
from .admin import LiveRequests
from .api.errors import ApiError, failed, unavailable
from .api.least_tokens import least_tokens
from .api.parsed_request import ModelLimits, ParsedRequest
from .api.text import Tokenizer
from .api_keys import client_of
from .asgi import Bodies, ClientGone, Responder
from .metrics import GatewayMetrics, Outcome, outcome_of
from .models import Caller, Models, ServedModel
from .rate_limit_gate import ticket_of
from .rate_limits import UNSTATED_OUTPUT_TOKENS
from .reply import Reply, SlowReader
from .request import Job, Request
from .request_log import MAX_PROMPT_TOKENS, RequestRecord, record_of

log = logging.getLogger(__name__)

STOPPING_GRACE_S = 1.0
MODEL_STATE = "model"  # in the ASGI scope's state: the name of the model that serves the request

Parse = Callable[[bytes, Tokenizer, ModelLimits], ParsedRequest]


@dataclass(frozen=True)
class Frontend:
    """What both endpoints need."""

    models: Models
    metrics: GatewayMetrics
    threads: Executor  # for parsing
    bodies: Bodies
    request_timeout_s: float | None = None
    live: LiveRequests = field(default_factory=LiveRequests)
    keep_alive_s: float = 10.0  # silence on a stream before a comment is sent


class Generate:
    """One endpoint, as an ASGI application."""

    def __init__(self, frontend: Frontend, parse: Parse) -> None:
        self._frontend = frontend
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._frontend.metrics
        lifetime = Lifetime()
        lifetime.mark(Event.ARRIVED)
        responder = Responder(scope, send)
        outcome = Outcome.ERROR
        metrics.inflight.inc()
        try:
            outcome = await self._answer(scope, receive, responder, lifetime)
        except asyncio.CancelledError:  # only the server does this, when its time to finish streams is up
            outcome = Outcome.SHUTDOWN
            with suppress(TimeoutError):
                async with asyncio.timeout(STOPPING_GRACE_S):
                    await responder.fail(unavailable("The gateway is stopping.", "shutdown"))
        except Exception:
            log.exception("a request failed through a fault of the gateway's own")
            await responder.fail(failed("Internal error of the gateway.", "internal_error"))
        finally:
            metrics.inflight.dec()
            model: str = scope["state"].get(MODEL_STATE, "")
            metrics.requests.labels(outcome.value, model).inc()
            lifetime.finish(outcome.value)
            if model:
                self._frontend.models.served[model].metrics.observe(lifetime)
            record_of(scope).note_end(lifetime, outcome.value)

    async def _answer(self, scope: Scope, receive: Receive, responder: Responder, lifetime: Lifetime) -> Outcome:
        frontend = self._frontend
        request_id = responder.request_id
        unsent: Callable[[], bytes] = bytes
        try:
            ticket = ticket_of(scope)
            ticket.expect_tokens()
            async with time_limit(frontend.request_timeout_s):
                body = await frontend.bodies.read(scope, receive)
                if ticket.counts_tokens:
                    loop = asyncio.get_running_loop()
                    ticket.require(await loop.run_in_executor(frontend.threads, least_tokens, body))
                client = client_of(scope)
                caller = Caller(client, request_id)
                model, parsed = await frontend.models.parse(frontend.threads, body, caller, self._parse)
                parsed = replace(parsed, model=model.name)
                scope["state"][MODEL_STATE] = model.name
                await self._note(record_of(scope), parsed, model.tokenizer)
                reply = Reply(parsed, model.tokenizer)
                ticket.reserve(tokens_to_reserve(parsed), functools.partial(tokens_used, parsed, reply, lifetime))
                unsent = reply.events.take_now
                try:
                    await self._generate(model, parsed, client, reply, receive, responder, lifetime)
                finally:
                    record_of(scope).note_reply(reply)
        except ApiError as error:
            if error.status >= 500:
                log.warning("%s: answered %d: %s", request_id, error.status, error.message)
            await responder.fail(error, unsent())
            return outcome_of(error.status, error.code)
        except ClientGone:
            log.info("%s: the client closed its connection", request_id)
            return Outcome.DISCONNECT
        except SlowReader as error:
            log.warning("%s: cut its connection off: %s", request_id, error)
            await responder.abort()
            return Outcome.DISCONNECT
        return Outcome.OK

    async def _note(self, record: RequestRecord, parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
        record.note_parsed(parsed)
        if record.wants_prompts:
            loop = asyncio.get_running_loop()
            record.note_prompts(await loop.run_in_executor(self._frontend.threads, texts_of, parsed, tokenizer))

    async def _generate(
        self,
        model: ServedModel,
        parsed: ParsedRequest,
        client: str,
        reply: Reply,
        receive: Receive,
        responder: Responder,
        lifetime: Lifetime,
    ) -> None:
        """Run every prompt to its end and answer. Raises the first cause of failure, after everything is released."""
        requests = [
            self._request(model, parsed, number, client, reply, lifetime) for number in range(len(parsed.prompts))
        ]
        reply.count_cached = lambda: sum(request.cached_tokens for request in requests)
        self._frontend.live.add(requests, responder.request_id)
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(responder.until_disconnect(receive))
                sender = group.create_task(self._send(responder, reply, requests)) if parsed.stream else None
                await asyncio.wait([group.create_task(request.run()) for request in requests])
                if sender is not None:
                    reply.end_stream()
                    await sender
                watch.cancel()
        except BaseExceptionGroup as causes:
            raise first_cause(causes) from None
        finally:
            self._frontend.live.remove(requests)
            model.metrics.generated_tokens.inc(reply.completion_tokens)
        model.metrics.prompt_tokens.inc(parsed.prompt_tokens)
        model.dispatcher.note_output(reply.completion_tokens / len(requests))
        if not parsed.stream:
            body = reply.body
            loop = asyncio.get_running_loop()
            scored = any(params.prompt_logprobs is not None for params in parsed.params)  # then it may be large
            await responder.json(200, await loop.run_in_executor(self._frontend.threads, body) if scored else body())

    async def _send(self, responder: Responder, reply: Reply, requests: Sequence[Request]) -> None:
        await responder.stream(
            reply.events, self._frontend.keep_alive_s, lambda: any(request.begun for request in requests)
        )

    def _request(
        self, model: ServedModel, parsed: ParsedRequest, number: int, client: str, reply: Reply, lifetime: Lifetime
    ) -> Request:
        job = Job(
            prompt=list(parsed.prompts[number]),
            num_choices=parsed.num_sampled,
            params=parsed.params[number],
            cache_salt=parsed.cache_salt,
            priority=parsed.priority,
            first_choice=number * parsed.num_sampled,
            client=client,
            grammar_field=parsed.grammar_field,
        )
        return Request(job, model.dispatcher, reply, lifetime, model.metrics, model.eos_token_ids)


@asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[None]:
    """Raises ApiError 504 when what is inside takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        text = f"The request took longer than {seconds:g} s."
        raise ApiError(504, text, type="server_error", code="timeout") from None


def tokens_to_reserve(parsed: ParsedRequest) -> int:
    """Of its client's tokens per minute: the prompts, and the longest answers that may come."""
    most = None if parsed.max_tokens_given else UNSTATED_OUTPUT_TOKENS
    longest = sum(params.max_tokens if most is None else min(params.max_tokens, most) for params in parsed.params)
    return parsed.prompt_tokens + parsed.num_sampled * longest


def tokens_used(parsed: ParsedRequest, reply: Reply, lifetime: Lifetime) -> int:
    """Nothing, if no worker ever took the request."""
    return parsed.prompt_tokens + reply.completion_tokens if lifetime.at(Event.RESERVED) is not None else 0


def texts_of(parsed: ParsedRequest, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(ids[:MAX_PROMPT_TOKENS], skip_special_tokens=False) for ids in parsed.prompts]


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception to act on. A fault of our own comes first: it must not be hidden by what it brought about."""

    def leaves(error: BaseException) -> list[BaseException]:
        if isinstance(error, BaseExceptionGroup):
            return [leaf for inner in error.exceptions for leaf in leaves(inner)]
        return [error]

    expected = (SlowReader, ClientGone, ApiError)
    return min(leaves(group), key=lambda e: next((i for i, kind in enumerate(expected, 1) if isinstance(e, kind)), 0))
