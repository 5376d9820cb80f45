"""Responses: what the official SDK's models read out of our bytes, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.api.parsed_request import Kind, ParsedRequest
from pdserve.gateway.api.responses import ChoiceResult, StreamWriter, Usage, error_event, new_reply_id, whole_response
from pdserve.gateway.api.text import TextOptions
from pdserve.transfer.sampling_params import SamplingParams

USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=4)
NASTY = 'quote " back \\ line \n sep \u2028 nel \x85 nul \x00 你好 👩\u200d👧 \ufffd'


def request_of(kind: Kind, **changes: Any) -> ParsedRequest:
    fields: dict[str, Any] = {
        "kind": kind, "model": 'de"mo', "prompts": ((1, 2), (3, 4, 5)) if kind == "completion" else ((1, 2, 3, 4, 5),),
        "n": 2, "params": (SamplingParams(max_tokens=5, seed=1),), "text": TextOptions(), "stream": True,
        "include_usage": False, "continuous_usage": False, "return_token_ids": False, "echo_texts": (),
        "cache_salt": "", "priority": 0,
    }  # fmt: skip
    return ParsedRequest(**fields | changes)


def events(raw: bytes) -> list[Any]:
    """Parsed strictly: one `data:` line and one empty line an event; the end mark as itself."""
    blocks = raw.decode("ascii").split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def stream(request: ParsedRequest) -> list[Any]:
    """Two tokens for every choice, interleaved."""
    writer, raw = StreamWriter(request, "id-1", 99), b""
    for choice in range(request.num_choices):
        raw += writer.delta(choice, "hel", [10], "", USAGE)
    for choice in range(request.num_choices):
        raw += writer.delta(choice, "lo", [11], "stop" if choice else "length", USAGE)
    return events(raw + writer.end(USAGE))


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("text", ["", "hello", NASTY])
def test_whole_chat_is_what_the_sdk_expects(text: str, finish: Any) -> None:
    raw = whole_response(request_of("chat"), "id-1", 99, [ChoiceResult(text, [7], finish)] * 2, USAGE)
    reply = ChatCompletion.model_validate_json(raw, strict=True)
    assert (reply.id, reply.object, reply.created, reply.model) == ("id-1", "chat.completion", 99, 'de"mo')
    assert [choice.index for choice in reply.choices] == [0, 1]
    message = reply.choices[1].message
    assert (message.role, message.content, message.refusal) == ("assistant", text, None)
    assert (reply.choices[0].finish_reason, reply.choices[0].logprobs) == (finish, None)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert (reply.usage.total_tokens, reply.usage.prompt_tokens_details.cached_tokens) == (12, 4)
    assert "system_fingerprint" not in json.loads(raw)


def test_whole_completion_is_what_the_sdk_expects_and_prompt_major() -> None:
    request = request_of("completion", echo_texts=("one ", "two "), return_token_ids=True)
    results = [ChoiceResult(f"t{index}", [index], "stop") for index in range(4)]
    raw = whole_response(request, "id-1", 99, results, USAGE)
    reply = Completion.model_validate_json(raw, strict=True)
    assert reply.object == "text_completion"
    assert [choice.text for choice in reply.choices] == ["one t0", "one t1", "two t2", "two t3"]
    members = json.loads(raw)["choices"]
    assert [choice["token_ids"] for choice in members] == [[0], [1], [2], [3]]
    assert [choice["prompt_token_ids"] for choice in members] == [[1, 2], [1, 2], [3, 4, 5], [3, 4, 5]]


def test_whole_chat_returns_token_ids_when_asked() -> None:
    results = [ChoiceResult("a", [7, 8], "stop")] * 2
    body = json.loads(whole_response(request_of("chat", return_token_ids=True), "i", 9, results, USAGE))
    assert body["prompt_token_ids"] == [1, 2, 3, 4, 5]
    assert [choice["token_ids"] for choice in body["choices"]] == [[7, 8], [7, 8]]
    assert "token_ids" not in whole_response(request_of("chat"), "i", 9, results, USAGE).decode()


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_chat_stream_is_role_text_one_finish_each_usage_and_done(include_usage: bool) -> None:
    *chunks, done = stream(request_of("chat", include_usage=include_usage))
    assert done == "[DONE]"
    parsed = [ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True) for chunk in chunks]
    if include_usage:
        last, raw_last = parsed.pop(), chunks.pop()
        assert (last.choices, raw_last["usage"]["total_tokens"]) == ([], 12)
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert {(chunk.id, chunk.object, chunk.model) for chunk in parsed} == {("id-1", "chat.completion.chunk", 'de"mo')}
    for index in range(2):
        mine = [chunk.choices[0] for chunk in parsed if chunk.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in mine[1:])
        assert "".join(choice.delta.content or "" for choice in mine) == "hello"
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop" if index else "length"]
        assert mine[-1].finish_reason is not None


def test_a_completion_stream_begins_with_the_echo_and_validates() -> None:
    *chunks, done = stream(request_of("completion", echo_texts=("one ", "two ")))
    assert done == "[DONE]"
    texts = [""] * 4
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["one hello", "one hello", "two hello", "two hello"]
    finals = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert len(finals) == 4
    for chunk in finals:  # the SDK's model wants a finish reason; OpenAI too sends null in the other chunks
        Completion.model_validate_json(json.dumps(chunk), strict=True)


def test_nothing_is_sent_for_a_token_without_text() -> None:
    writer = StreamWriter(request_of("chat"), "i", 9)
    assert len(events(writer.delta(0, "", [1], "", USAGE))) == 1, "the first carries the role"
    assert writer.delta(0, "", [2], "", USAGE) == b""
    (chunk,) = events(writer.delta(0, "", [3], "stop", USAGE))
    assert chunk["choices"][0]["delta"] == {}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streamed_token_ids_add_up_and_the_prompt_is_in_the_first_chunk(kind: Kind) -> None:
    request = request_of(kind, return_token_ids=True)
    writer, raw = StreamWriter(request, "i", 9), b""
    for text, token, finish in [("a", 1, ""), ("", 2, ""), ("b", 3, "stop")]:
        raw += writer.delta(1, text, [token], finish, USAGE)  # type: ignore[arg-type]
    chunks = events(raw)
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == [1, 2, 3]
    holders = chunks if kind == "chat" else [chunk["choices"][0] for chunk in chunks]
    assert holders[0]["prompt_token_ids"] == list(request.prompts[0])
    assert all("prompt_token_ids" not in holder for holder in holders[1:])


def test_continuous_usage_is_on_every_chunk() -> None:
    *chunks, _done = stream(request_of("chat", include_usage=True, continuous_usage=True))
    assert all(chunk["usage"]["completion_tokens"] == 7 for chunk in chunks)


def test_a_second_finish_or_an_early_end_is_our_bug() -> None:
    writer = StreamWriter(request_of("chat", n=1), "i", 9)
    with pytest.raises(AssertionError):
        writer.end(USAGE)
    writer.delta(0, "x", [1], "stop", USAGE)
    with pytest.raises(AssertionError):
        writer.delta(0, "x", [1], "stop", USAGE)


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5))
def test_streamed_text_is_byte_exact_with_the_whole_and_no_text_breaks_an_event(texts: list[str]) -> None:
    request = request_of("chat", n=1)
    writer, raw = StreamWriter(request, "i", 9), b""
    for index, text in enumerate(texts):
        raw += writer.delta(0, text, [1], "stop" if index == len(texts) - 1 else "", USAGE)
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(raw))
    whole = json.loads(whole_response(request, "i", 9, [ChoiceResult("".join(texts), [1], "stop")], USAGE))
    assert streamed == whole["choices"][0]["message"]["content"]


def test_not_even_an_unpaired_surrogate_breaks_an_event() -> None:
    writer = StreamWriter(request_of("chat", n=1), "i", 9)
    assert len(events(writer.delta(0, "a\ud800", [1], "stop", USAGE))) == 2


def test_cached_tokens_never_exceed_the_prompt() -> None:
    raw = whole_response(request_of("chat"), "i", 9, [ChoiceResult("", [], "stop")] * 2, Usage(5, 1, 9))
    assert json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"] == 5


def test_an_error_in_a_stream_has_openais_shape() -> None:
    (event,) = events(error_event(ApiError(500, "poison", type="server_error", code="poison")))
    assert event == {"error": {"message": "poison", "type": "server_error", "param": None, "code": "poison"}}


def test_reply_ids_say_their_kind_and_differ() -> None:
    assert new_reply_id("chat").startswith("chatcmpl-")
    assert new_reply_id("completion").startswith("cmpl-")
    assert new_reply_id("chat") != new_reply_id("chat")
