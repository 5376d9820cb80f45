"""One streamed request to an OpenAI-compatible server, and the model it serves.

A request that fails is a record with an error kind, never an exception:

    connect        no connection              timeout      nothing finished within --timeout-s
    http_<status>  refused                    truncated    the stream ended without a finish reason and [DONE]
    stream_error   an error inside a stream   bad_stream   bytes that are not the protocol
    disconnected   the connection broke       interrupted  the run was stopped by the user
    not_sent       --max-outstanding was reached
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from .errors import BenchError
from .record import INTERRUPTED, RequestRecord, monotonic
from .sse import SSEReader
from .workload import PlannedRequest

DONE = "[DONE]"
MAX_DETAIL_CHARS = 300
LOOKUP_TIMEOUT_S = 10.0


class StreamFailure(Exception):
    """A response that is not a complete, well-formed stream; `kind` is counted."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class Dialect:
    """What a server makes of the API. `as_text`: a prompt's text, for one that takes no token ids."""

    ignore_eos: bool = True
    as_text: Callable[[list[int]], str] | None = None


PLAIN = Dialect()


@dataclass(frozen=True)
class ServedModel:
    name: str
    max_model_len: int | None  # None: the server does not say


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """A session that opens a connection per request: a kept one may be closed under us, and would hide that cost."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    )


async def find_model(session: aiohttp.ClientSession, url: str, wanted: str | None) -> ServedModel:
    """Ask /v1/models. With `wanted` a server without that route is fine. Raises BenchError when it cannot be used."""
    try:
        timeout = aiohttp.ClientTimeout(total=LOOKUP_TIMEOUT_S)
        async with session.get(f"{url}/v1/models", timeout=timeout) as response:
            if response.status != 200:
                if wanted is not None:
                    return ServedModel(wanted, None)
                raise BenchError(f"{url}/v1/models answered {response.status}; give --model")
            listing = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchError(f"cannot reach {url}: {error or type(error).__name__}") from error
    except ValueError as error:
        raise BenchError(f"{url}/v1/models did not answer JSON") from error
    entries = listing.get("data") if isinstance(listing, dict) else None
    named = [e for e in entries if isinstance(e, dict) and "id" in e] if isinstance(entries, list) else []
    models = {str(entry["id"]): entry for entry in named}
    name = wanted if wanted is not None else next(iter(models), None)
    if name is None:
        raise BenchError(f"{url} serves no model")
    if models and name not in models:
        raise BenchError(f"{url} does not serve {name!r}; it serves {', '.join(models)}")
    length = models.get(name, {}).get("max_model_len")
    return ServedModel(name, length if type(length) is int and length > 0 else None)


@dataclass(frozen=True)
class Client:
    """Sends requests to one server; `send` never raises except when it is cancelled."""

    session: aiohttp.ClientSession
    url: str
    model: str
    dialect: Dialect = PLAIN

    async def send(self, planned: PlannedRequest, scheduled_s: float | None, record: RequestRecord) -> None:
        """Send one request and fill `record` as its stream arrives."""
        body = json.dumps(request_body(self.model, planned, self.dialect)).encode()
        record.scheduled_s = scheduled_s
        record.sent_s = monotonic()
        try:
            await self._stream(body, record)
        except asyncio.CancelledError:
            record.error = INTERRUPTED
            raise
        except StreamFailure as failure:
            record.error, record.detail = failure.kind, str(failure)[:MAX_DETAIL_CHARS]
        except TimeoutError:  # before OSError: it is one
            record.error, record.detail = "timeout", f"not finished after {monotonic() - record.sent_s:.1f} s"
        except aiohttp.ClientConnectorError as error:
            record.error, record.detail = "connect", str(error)[:MAX_DETAIL_CHARS]
        except (aiohttp.ClientError, OSError) as error:
            record.error, record.detail = "disconnected", (str(error) or type(error).__name__)[:MAX_DETAIL_CHARS]
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or without end
            record.error, record.detail = "bad_stream", str(error)[:MAX_DETAIL_CHARS]
        finally:
            record.ended_s = monotonic()

    async def _stream(self, body: bytes, record: RequestRecord) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        async with self.session.post(f"{self.url}/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                raise StreamFailure(f"http_{response.status}", _error_text(await response.content.read(4096)))
            reader = SSEReader()
            done = False
            async for chunk in response.content.iter_any():  # to the end: a server may take less for a disconnect
                arrived_s = monotonic()
                for data in reader.feed(chunk):
                    done = done or data == DONE
                    if not done:
                        take_event(json.loads(data), arrived_s, record)
        if not (done and record.finish_reason):
            missing = "a finish reason" if done else DONE
            raise StreamFailure(
                "truncated", f"the stream ended after {len(record.token_times_s)} tokens without {missing}"
            )


def request_body(model: str, planned: PlannedRequest, dialect: Dialect = PLAIN) -> dict[str, Any]:
    """Greedy, of exact length (`ignore_eos`), with token ids and usage so that tokens are counted, not guessed."""
    body = {
        "model": model,
        "prompt": planned.prompt if dialect.as_text is None else dialect.as_text(planned.prompt),
        "max_tokens": planned.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if dialect.as_text is None:
        body["return_token_ids"] = True
    if dialect.ignore_eos:
        body["ignore_eos"] = True
    return body


def take_event(event: object, arrived_s: float, record: RequestRecord) -> None:
    """Account for one decoded stream event. Raises StreamFailure when it is an error or not a completion chunk."""
    if not isinstance(event, dict):
        raise StreamFailure("bad_stream", f"an event that is not an object: {event!r}")
    if event.get("error") is not None:
        raise StreamFailure("stream_error", _error_message(event["error"]))
    if isinstance(usage := event.get("usage"), dict):
        record.reported_input_tokens = _count(usage.get("prompt_tokens"))
        record.reported_output_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        record.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise StreamFailure("bad_stream", "a chunk without choices")
    for choice in choices:
        if not isinstance(choice, dict):
            raise StreamFailure("bad_stream", f"a choice that is not an object: {choice!r}")
        if num_tokens := _tokens_in(choice):
            record.token_times_s.extend([arrived_s] * num_tokens)
            record.num_chunks += 1
        record.finish_reason = str(choice.get("finish_reason") or record.finish_reason)


def _tokens_in(choice: dict[str, Any]) -> int:
    """Tokens a chunk carries: its ids, or one for a server that does not send ids, unless the chunk only ends."""
    token_ids = choice.get("token_ids")
    if isinstance(token_ids, list):
        return len(token_ids)
    return 1 if choice.get("text") or not choice.get("finish_reason") else 0


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _error_text(body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _error_message(parsed["error"]) if isinstance(parsed, dict) and "error" in parsed else text


def _error_message(error: object) -> str:
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)
