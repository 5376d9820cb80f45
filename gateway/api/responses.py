"""Responses in OpenAI's shapes: whole bodies, and the server-sent events of a stream.

JSON is put together from a fixed frame and escaped strings, since one chunk is written per token. Output is pure
ASCII (`\\uXXXX` escapes): clients that split lines at U+2028 or U+0085 must not cut an event in two.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .call_json import CallDeltas, whole_calls
from .chat_output import Call, Delta, FinishReason
from .errors import ApiError
from .parsed_request import Kind, ParsedRequest

NOTHING_MORE = Delta()
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients ignore it
CONTENT_TYPE_STREAM = "text/event-stream; charset=utf-8"

_REPLY_PREFIX: dict[Kind, str] = {"chat": "chatcmpl-", "completion": "cmpl-"}
_STREAM_OBJECT: dict[Kind, str] = {"chat": "chat.completion.chunk", "completion": "text_completion"}
_WHOLE_OBJECT: dict[Kind, str] = {"chat": "chat.completion", "completion": "text_completion"}


@dataclass(frozen=True)
class Usage:
    """Token counts over the whole request. `completion_tokens` adds up all choices, the finishing token included;
    `cached_tokens` (≤ `prompt_tokens`) are prompt tokens found in a prefix cache;
    `reasoning_tokens` (≤ `completion_tokens`) is None where no reasoning parser is on."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None


@dataclass(frozen=True)
class ChoiceResult:
    """One finished choice: its content, all its tokens, why it ended ("stop" when a stop string was found), and what
    else a chat message holds. `logprobs` is JSON already (`logprobs.py`)."""

    text: str
    token_ids: Sequence[int]
    finish: FinishReason
    reasoning: str = ""
    calls: Sequence[Call] = ()
    logprobs: str = "null"


def new_reply_id(kind: Kind) -> str:
    """The public `id` of a response; never used as a key inside the system."""
    return _REPLY_PREFIX[kind] + secrets.token_hex(16)


def _usage_json(usage: Usage) -> str:
    reasoning = ""
    if usage.reasoning_tokens is not None:
        reasoning = f',"completion_tokens_details":{{"reasoning_tokens":{usage.reasoning_tokens}}}'
    return (
        f'{{"prompt_tokens":{usage.prompt_tokens},"completion_tokens":{usage.completion_tokens}'
        f',"total_tokens":{usage.prompt_tokens + usage.completion_tokens}'
        f',"prompt_tokens_details":{{"cached_tokens":{min(usage.cached_tokens, usage.prompt_tokens)}}}{reasoning}}}'
    )


def _finish_json(finish: FinishReason) -> str:
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

    The first event of a chat choice carries the role, that of a completion choice the echoed prompt. `prompt_logprobs`
    gives the JSON of what is said of prompt i, for the first event too; it is asked when that is sent.
    """

    def __init__(
        self,
        request: ParsedRequest,
        reply_id: str,
        created: int,
        prompt_logprobs: Callable[[int], str] | None = None,
    ) -> None:
        self._request = request
        self._prompt_logprobs = prompt_logprobs
        self._chat = request.kind == "chat"
        self._head = (
            f'{{"id":{json.dumps(reply_id)},"object":"{_STREAM_OBJECT[request.kind]}","created":{created}'
            f',"model":{json.dumps(request.model)},'
        )
        self._started = [False] * request.num_choices
        self._finished = [False] * request.num_choices
        self._call_deltas = CallDeltas(request.output.calling) if request.output.calling else None

    def delta(
        self,
        choice: int,
        text: str,
        token_ids: Sequence[int],
        finish: FinishReason,
        usage: Usage,
        more: Delta = NOTHING_MORE,
        logprobs: str = "null",
    ) -> bytes:
        """Events for new content and tokens of one choice; `usage` as of now (used with continuous usage only). Of
        `more` the reasoning and the calls count. `logprobs` is JSON."""
        assert not self._finished[choice], "a choice has exactly one finish reason"
        self._finished[choice] = bool(finish)
        first = not self._started[choice]
        opening = b""
        if first and self._chat:
            content = "null" if self._call_deltas else '""'
            opening = self._chunk(choice, f'"delta":{{"role":"assistant","content":{content}}}', "", first, "", usage)
        if first and self._request.echo_texts:
            text = self._request.echo_texts[choice // self._request.n] + text
        if self._call_deltas is not None:
            for call in self._call_deltas.openings(more.calls):
                opening += self._chunk(choice, f'"delta":{{{call}}}', "", False, "", usage)
        members = self._members(text, more) if self._chat else ""
        silent = not text and not members and not finish and logprobs == "null"
        if silent and not (self._request.return_token_ids and token_ids):
            self._started[choice] = bool(opening) or not first
            return opening
        self._started[choice] = True
        if self._chat:
            members = members or ("" if finish else '"content":""')
            body = f'"delta":{{{members}}}'
        else:
            body = f'"text":{json.dumps(text)}'
        ids = f',"token_ids":{_ids_json(token_ids)}' if self._request.return_token_ids else ""
        return opening + self._chunk(choice, body, finish, first and not self._chat, ids, usage, logprobs)

    def _members(self, text: str, more: Delta) -> str:
        """Of a chat's delta."""
        members = [f'"reasoning_content":{json.dumps(more.reasoning)}'] if more.reasoning else []
        if text:
            members.append(f'"content":{json.dumps(text)}')
        if self._call_deltas is not None and (arguments := self._call_deltas.arguments(more.calls)):
            members.append(arguments)
        return ",".join(members)

    def _chunk(
        self, choice: int, body: str, finish: FinishReason, first: bool, ids: str, usage: Usage, logprobs: str = "null"
    ) -> bytes:
        request = self._request
        outer = ""
        if first:
            number = choice // request.n
            said = self._prompt_logprobs(number) if self._prompt_logprobs is not None else ""
            prompt = _prompt_members(request, number, said)
            # Beside `choices` for chat (there is one prompt), inside the choice for completions.
            outer, ids = (prompt, ids) if self._chat else ("", prompt + ids)
        return _event(
            f'{self._head}"choices":[{{"index":{choice},{body},"logprobs":{logprobs}'
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


def _message(request: ParsedRequest, result: ChoiceResult) -> str:
    text = "".join(request.echo_texts) + result.text
    content = "null" if result.calls and not text else json.dumps(text)
    members = [f'"role":"assistant","content":{content},"refusal":null']
    if request.output.reasoning is not None:
        members.append(f'"reasoning_content":{json.dumps(result.reasoning or None)}')
    if result.calls and request.output.calling is not None:
        members.append(whole_calls(request.output.calling, result.calls))
    return ",".join(members)


def _prompt_members(request: ParsedRequest, number: int, logprobs: str) -> str:
    """What is said of prompt `number`, as members that follow others."""
    ids = f',"prompt_token_ids":{_ids_json(request.prompts[number])}' if request.return_token_ids else ""
    return ids + (f',"prompt_logprobs":{logprobs}' if logprobs else "")


def whole_response(
    request: ParsedRequest,
    reply_id: str,
    created: int,
    results: Sequence[ChoiceResult],
    usage: Usage,
    prompt_logprobs: Sequence[str] = (),
) -> bytes:
    """The JSON body of a request that is not streamed; `results` in choice order (prompt-major), `prompt_logprobs`
    (JSON) by prompt, when they were asked for."""
    said = prompt_logprobs or [""] * len(request.prompts)
    choices = []
    for index, result in enumerate(results):
        members = [f'"index":{index}']
        if request.kind == "chat":
            members.append(f'"message":{{{_message(request, result)}}}')
        else:
            echo = request.echo_texts[index // request.n] if request.echo_texts else ""
            members.append(f'"text":{json.dumps(echo + result.text)}')
        members.append(f'"logprobs":{result.logprobs},"finish_reason":{_finish_json(result.finish)}')
        if request.return_token_ids:
            members.append(f'"token_ids":{_ids_json(result.token_ids)}')
        number = index // request.n
        inner = _prompt_members(request, number, said[number]) if request.kind == "completion" else ""
        choices.append("{" + ",".join(members) + inner + "}")
    outer = _prompt_members(request, 0, said[0]) if request.kind == "chat" else ""
    return (
        f'{{"id":{json.dumps(reply_id)},"object":"{_WHOLE_OBJECT[request.kind]}","created":{created}'
        f',"model":{json.dumps(request.model)},"choices":[{",".join(choices)}]'
        f',"usage":{_usage_json(usage)}{outer}}}'
    ).encode("ascii")
