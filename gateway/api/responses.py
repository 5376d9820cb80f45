"""Responses in OpenAI's shapes: whole bodies, and the server-sent events of a stream.

JSON is put together from a fixed frame and escaped strings, since one chunk is written per token. Output is pure
ASCII (`\\uXXXX` escapes): clients that split lines at U+2028 or U+0085 must not cut an event in two.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ...transfer.messages import Finish
from .errors import ApiError
from .parsed_request import Kind, ParsedRequest

DONE = b"data: [DONE]\n\n"
CONTENT_TYPE_STREAM = "text/event-stream; charset=utf-8"

_REPLY_PREFIX: dict[Kind, str] = {"chat": "chatcmpl-", "completion": "cmpl-"}
_STREAM_OBJECT: dict[Kind, str] = {"chat": "chat.completion.chunk", "completion": "text_completion"}
_WHOLE_OBJECT: dict[Kind, str] = {"chat": "chat.completion", "completion": "text_completion"}


@dataclass(frozen=True)
class Usage:
    """Token counts over the whole request. `completion_tokens` adds up all choices, the finishing token included;
    `cached_tokens` (≤ `prompt_tokens`) are prompt tokens found in a prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class ChoiceResult:
    """One finished choice: the concatenation of everything `ChoiceText.push` returned, all its tokens, and why it
    ended ("stop" when a stop string was found)."""

    text: str
    token_ids: Sequence[int]
    finish: Finish


def new_reply_id(kind: Kind) -> str:
    """The public `id` of a response; never used as a key inside the system."""
    return _REPLY_PREFIX[kind] + secrets.token_hex(16)


def _usage_json(usage: Usage) -> str:
    return (
        f'{{"prompt_tokens":{usage.prompt_tokens},"completion_tokens":{usage.completion_tokens}'
        f',"total_tokens":{usage.prompt_tokens + usage.completion_tokens}'
        f',"prompt_tokens_details":{{"cached_tokens":{min(usage.cached_tokens, usage.prompt_tokens)}}}}}'
    )


def _finish_json(finish: Finish) -> str:
    return f'"{finish}"' if finish else "null"


def _ids_json(token_ids: Sequence[int]) -> str:
    return "[" + ",".join(map(str, token_ids)) + "]"


def _event(body: str) -> bytes:
    return f"data: {body}\n\n".encode("ascii")


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails after it has begun (no [DONE] follows)."""
    return _event(json.dumps(error.body()))


class StreamWriter:
    """Turns what happens to the choices of one streamed request into server-sent events.

        writer = StreamWriter(request, new_reply_id(request.kind), int(time.time()))
        writer.delta(choice, text, token_ids, finish, usage)   # once per `ChoiceText.push`; b"" when nothing to say
        writer.end(usage)                                      # after every choice has had its finish reason

    The first event of a chat choice carries the role, that of a completion choice the echoed prompt.
    """

    def __init__(self, request: ParsedRequest, reply_id: str, created: int) -> None:
        self._request = request
        self._chat = request.kind == "chat"
        self._head = (
            f'{{"id":{json.dumps(reply_id)},"object":"{_STREAM_OBJECT[request.kind]}","created":{created}'
            f',"model":{json.dumps(request.model)},'
        )
        self._started = [False] * request.num_choices
        self._finished = [False] * request.num_choices

    def delta(self, choice: int, text: str, token_ids: Sequence[int], finish: Finish, usage: Usage) -> bytes:
        """Events for new text and tokens of one choice; `usage` as of now (used with continuous usage only)."""
        assert not self._finished[choice], "a choice has exactly one finish reason"
        self._finished[choice] = bool(finish)
        first = not self._started[choice]
        self._started[choice] = True
        opening = b""
        if first and self._chat:
            opening = self._chunk(choice, '"delta":{"role":"assistant","content":""}', "", first, "", usage)
        if first and self._request.echo_texts:
            text = self._request.echo_texts[choice // self._request.n] + text
        if not text and not finish and not (self._request.return_token_ids and token_ids):
            return opening
        if self._chat:
            body = f'"delta":{{"content":{json.dumps(text)}}}' if text or not finish else '"delta":{}'
        else:
            body = f'"text":{json.dumps(text)}'
        ids = f',"token_ids":{_ids_json(token_ids)}' if self._request.return_token_ids else ""
        return opening + self._chunk(choice, body, finish, first and not self._chat, ids, usage)

    def _chunk(self, choice: int, body: str, finish: Finish, first: bool, ids: str, usage: Usage) -> bytes:
        request = self._request
        outer = ""
        if first and request.return_token_ids:
            prompt = f'"prompt_token_ids":{_ids_json(request.prompts[choice // request.n])}'
            # Beside `choices` for chat (there is one prompt), inside the choice for completions.
            outer, ids = (f",{prompt}", ids) if self._chat else ("", f",{prompt}{ids}")
        return _event(
            f'{self._head}"choices":[{{"index":{choice},{body},"logprobs":null'
            f',"finish_reason":{_finish_json(finish)}{ids}}}]{outer}{self._usage_member(usage)}}}'
        )

    def _usage_member(self, usage: Usage) -> str:
        if self._request.continuous_usage:
            return f',"usage":{_usage_json(usage)}'
        return ',"usage":null' if self._request.include_usage else ""

    def end(self, usage: Usage) -> bytes:
        """The usage chunk, when asked for, and the end mark."""
        assert all(self._finished), "a stream ends after every choice has its finish reason"
        if not self._request.include_usage:
            return DONE
        return _event(f'{self._head}"choices":[],"usage":{_usage_json(usage)}}}') + DONE


def whole_response(
    request: ParsedRequest, reply_id: str, created: int, results: Sequence[ChoiceResult], usage: Usage
) -> bytes:
    """The JSON body of a request that is not streamed; `results` in choice order (prompt-major)."""
    choices = []
    for index, result in enumerate(results):
        members = [f'"index":{index}']
        if request.kind == "chat":
            text = json.dumps(result.text)
            members.append(f'"message":{{"role":"assistant","content":{text},"refusal":null}}')
        else:
            echo = request.echo_texts[index // request.n] if request.echo_texts else ""
            members.append(f'"text":{json.dumps(echo + result.text)}')
        members.append(f'"logprobs":null,"finish_reason":{_finish_json(result.finish)}')
        if request.return_token_ids:
            members.append(f'"token_ids":{_ids_json(result.token_ids)}')
            if request.kind == "completion":
                members.append(f'"prompt_token_ids":{_ids_json(request.prompts[index // request.n])}')
        choices.append("{" + ",".join(members) + "}")
    outer = ""
    if request.return_token_ids and request.kind == "chat":
        outer = f',"prompt_token_ids":{_ids_json(request.prompts[0])}'
    return (
        f'{{"id":{json.dumps(reply_id)},"object":"{_WHOLE_OBJECT[request.kind]}","created":{created}'
        f',"model":{json.dumps(request.model)},"choices":[{",".join(choices)}]'
        f',"usage":{_usage_json(usage)}{outer}}}'
    ).encode("ascii")
