"""Tokens in, answers out: streamed and whole ones say the same, to the byte, with calls and reasoning in them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pdserve.engine.checkpoint import resolve
from pdserve.gateway.api.chat_output import Calling, OutputFormat
from pdserve.gateway.api.parsed_request import ModelLimits, ParsedRequest
from pdserve.gateway.api.parsing import parse_chat
from pdserve.gateway.api.text import Tokenizer
from pdserve.gateway.reply import Reply
from pdserve.transfer.errors import ConfigError
from pdserve.transfer.messages import Finish, TokenLogprobs

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}}
LIMITS = ModelLimits(("m",), 100_000, 100_000)
AUTO = Calling("auto", ("f", "g"))
REQUIRED = Calling("required", ("f",))
BOTH = [("f", '{"a": "你"}'), ("g", "{}")]
CALLS = 'Hm.\n<tool_call>{"name": "f", "arguments": {"a": "你"}}</tool_call><tool_call>{"name": "g"}</tool_call>'


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    try:
        return Tokenizer(resolve("demo"))
    except ConfigError as error:
        pytest.skip(str(error))


def request_of(tokenizer: Tokenizer, output: OutputFormat | None = None, **fields: Any) -> ParsedRequest:
    parsed = parse_chat(json.dumps(BODY | {"stream": True} | fields).encode(), tokenizer, LIMITS)
    return replace(parsed, output=output) if output is not None else parsed


def feed(
    reply: Reply, ids: list[int], finish: Finish, *, late: bool = False, logprobs: TokenLogprobs | None = None
) -> int:
    """The tokens of every choice, as far as they are wanted; how many were."""
    for number, token in enumerate(ids):
        last = number == len(ids) - 1
        if reply.token(0, token, finish if last and not late else "", logprobs) and not last:
            return number + 1
    if late:
        reply.late_finish(0, finish)
    return len(ids)


def whole(tokenizer: Tokenizer, parsed: ParsedRequest, ids: list[int], finish: Finish = "stop", **how: Any) -> Any:
    reply = Reply(replace(parsed, stream=False), tokenizer)
    feed(reply, ids, finish, **how)
    return json.loads(reply.body())


def streamed(
    tokenizer: Tokenizer, parsed: ParsedRequest, ids: list[int], finish: Finish = "stop", **how: Any
) -> list[Any]:
    reply = Reply(parsed, tokenizer)
    feed(reply, ids, finish, **how)
    reply.end_stream()
    *events, done, rest = reply.events.take_now().decode("ascii").split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def put_together(chunks: list[Any]) -> Any:
    """A body like that of a whole answer, out of a stream's chunks, as clients do it."""
    *deltas, last = chunks
    message: dict[str, Any] = {"content": None, "reasoning_content": None}
    calls: dict[int, dict[str, Any]] = {}
    reasons = []
    for chunk in deltas:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
        (choice,) = chunk["choices"]
        for name in ("content", "reasoning_content"):
            if (new := choice["delta"].get(name)) is not None:
                message[name] = (message[name] or "") + new
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert (call["index"], call["type"], call["function"]["arguments"]) == (len(calls), "function", "")
                calls[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
            else:
                assert call.keys() == {"index", "function"}
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert deltas[0]["choices"][0]["delta"]["role"] == "assistant"
    (reason,) = reasons
    return message | {"calls": list(calls.values()), "finish_reason": reason, "usage": last["usage"]}


def summary(body: Any) -> Any:
    """The same of a whole answer."""
    ChatCompletion.model_validate_json(json.dumps(body), strict=True)
    (choice,) = body["choices"]
    message = choice["message"]
    return {
        "content": message["content"],
        "reasoning_content": message.get("reasoning_content"),
        "calls": [call["function"] for call in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
        "usage": body["usage"],
    }


# --- text to the byte ------------------------------------------------------------------------------------------------

ALPHABETS = [
    "你好世界漢字かなカナ한국어",
    "👩‍👩‍👧🇩🇪👍🏽🏴󠁧󠁢󠁥󠁮󠁧󠁿❤️‍🔥",
    "e\u0301a\u0308\u0323\u200d\u200b\u0e01\u0e34\u0939\u093f",
    "abc XYZ.,!\n\t ",
    "\U0010fffd\u0007\x7f\u00ad\u2028\ufeff\ufffd",
    "مرحبا שלום",
]


def random_text(rng: random.Random) -> str:
    alphabets = rng.choices(ALPHABETS, k=rng.randint(1, 4))
    return "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 40)))


def test_a_thousand_strings_of_every_script_are_streamed_to_the_byte(demo: Tokenizer) -> None:
    rng = random.Random(20261130)
    parsed, reading = request_of(demo), request_of(demo, OutputFormat(AUTO, "maybe"))
    for number in range(1000):
        text = random_text(rng)
        ids = demo.encode(text)
        for request in (parsed, reading) if number % 4 == 0 else (parsed,):
            answer = summary(whole(demo, request, ids, "length"))
            assert answer["content"] == text
            chunks = streamed(demo, request, ids, "length")
            assert put_together(chunks)["content"] == text
            shown = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1]]
            assert sum(piece.count("\ufffd") for piece in shown) == text.count("\ufffd")


def test_random_bytes_are_streamed_as_they_are_told_whole(demo: Tokenizer) -> None:
    rng = random.Random(7)
    parsed = request_of(demo)
    for _ in range(300):
        ids = [rng.randrange(3, 300) for _ in range(rng.randint(1, 30))]
        content = summary(whole(demo, parsed, ids, "length"))["content"]
        assert content == demo.decode(ids, skip_special_tokens=True)
        assert put_together(streamed(demo, parsed, ids, "length"))["content"] == content


# --- calls and reasoning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "text", "content", "reasoning", "calls", "reason"),
    [
        (OutputFormat(AUTO), CALLS, "Hm.", None, BOTH, "tool_calls"),
        (OutputFormat(AUTO), "no call", "no call", None, [], "stop"),
        (OutputFormat(AUTO), "<tool_call>oops", "<tool_call>oops", None, [], "stop"),
        (OutputFormat(AUTO, "maybe"), f"<think>\nwhy 你\n</think>\n{CALLS}", "Hm.", "why 你", BOTH, "tool_calls"),
        (OutputFormat(None, "yes"), "why</think>so", "so", "why", [], "stop"),
        (OutputFormat(Calling("named", ("f",), parallel=False)), '{"a": 1}', None, None, [("f", '{"a": 1}')], "stop"),
        (OutputFormat(REQUIRED), '[{"name": "f", "parameters": {}}]', None, None, [("f", "{}")], "tool_calls"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("late", [False, True])
def test_calls_and_reasoning_are_the_same_streamed_and_whole(
    demo: Tokenizer, output: OutputFormat, text: str, content: str, reasoning: str, calls: Any, reason: str, late: bool
) -> None:
    parsed = request_of(demo, output)
    ids = demo.encode(text) + ([] if late else [2])
    answer = summary(whole(demo, parsed, ids, late=late))
    assert (answer["content"], answer["reasoning_content"], answer["finish_reason"]) == (content, reasoning, reason)
    assert [(call["name"], call["arguments"]) for call in answer["calls"]] == calls
    together = put_together(streamed(demo, parsed, ids, late=late))
    assert together | {"content": together["content"] or answer["content"]} == answer
    assert answer["usage"]["completion_tokens"] == len(ids)


def test_reasoning_tokens_are_counted_where_a_parser_is_on(demo: Tokenizer) -> None:
    thought, answer = demo.encode("why not, 你好</think>"), demo.encode("\n\nyes")
    usage = whole(demo, request_of(demo, OutputFormat(None, "yes")), thought + answer)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(thought)}
    assert usage["completion_tokens"] == len(thought) + len(answer)
    assert "completion_tokens_details" not in whole(demo, request_of(demo), thought)["usage"]


@pytest.mark.parametrize("name", [AUTO, Calling("auto", ("f",), parser="mistral")])
def test_call_ids_are_unique_and_in_the_models_form(demo: Tokenizer, name: Calling) -> None:
    text = CALLS if name.parser == "hermes" else '[TOOL_CALLS][{"name": "f"}, {"name": "f"}]'
    message = whole(demo, request_of(demo, OutputFormat(name)), demo.encode(text))["choices"][0]["message"]
    first, second = (call["id"] for call in message["tool_calls"])
    assert first != second
    assert first.startswith("call_") if name.parser == "hermes" else first.isalnum() and len(first) == 9


def test_where_one_call_is_allowed_the_choice_is_over_with_it(demo: Tokenizer) -> None:
    parsed = request_of(demo, OutputFormat(replace(AUTO, parallel=False)))
    ids = demo.encode(CALLS)
    wanted = feed(Reply(parsed, demo), ids, "length")
    assert wanted < len(ids)
    answer = summary(whole(demo, parsed, ids, "length"))
    assert (len(answer["calls"]), answer["finish_reason"]) == (1, "tool_calls")
    assert answer["usage"]["completion_tokens"] == wanted
    assert put_together(streamed(demo, parsed, ids, "length")) == answer


def test_the_deprecated_shape_is_answered_in_kind(demo: Tokenizer) -> None:
    calling = Calling("auto", ("f",), parallel=False, legacy=True)
    parsed = request_of(demo, OutputFormat(calling))
    ids = demo.encode('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    (choice,) = whole(demo, parsed, ids)["choices"]
    expected = {"name": "f", "arguments": '{"a": 1}'}
    assert (choice["message"]["function_call"], choice["finish_reason"]) == (expected, "function_call")
    assert choice["message"]["content"] is None
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in streamed(demo, parsed, ids)[:-1]]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["f"]
    assert "".join(delta.get("arguments", "") for delta in deltas) == '{"a": 1}'


def test_cut_short_in_a_call_is_told_so(demo: Tokenizer) -> None:
    parsed = request_of(demo, OutputFormat(AUTO))
    ids = demo.encode('<tool_call>{"name": "f", "arguments": {"a": "x')
    answer = summary(whole(demo, parsed, ids, "length"))
    assert (answer["finish_reason"], answer["calls"][0]["arguments"]) == ("length", '{"a": "x')
    stopped = summary(whole(demo, request_of(demo, OutputFormat(AUTO), stop=["x"]), ids, "length"))
    assert (stopped["finish_reason"], stopped["calls"][0]["arguments"]) == ("stop", '{"a": "')
    behind = summary(whole(demo, request_of(demo, OutputFormat(AUTO), stop=["</tool_call>"]), demo.encode(CALLS)))
    assert (behind["finish_reason"], behind["calls"][0]["arguments"]) == ("tool_calls", '{"a": "你"}')


def test_openais_client_adds_a_stream_with_calls_up_to_the_whole_answer(demo: Tokenizer) -> None:
    parsed = request_of(demo, OutputFormat(AUTO, "maybe"))
    ids = demo.encode(f"<think>why</think>{CALLS}")
    reply = Reply(parsed, demo)
    feed(reply, ids, "stop")
    reply.end_stream()
    headers = {"content-type": "text/event-stream"}
    answer = httpx.Response(200, headers=headers, content=reply.events.take_now())
    http = httpx.Client(transport=httpx.MockTransport(lambda _: answer))
    client = openai.OpenAI(api_key="none", base_url="http://gateway/v1", http_client=http)
    with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "hi"}]) as stream:
        (summed,) = stream.get_final_completion().choices
    (choice,) = whole(demo, parsed, ids)["choices"]
    assert summed.message.tool_calls is not None
    assert [call.function.name for call in summed.message.tool_calls] == ["f", "g"]
    assert [call.function.arguments for call in summed.message.tool_calls] == [a for _, a in BOTH]
    assert (summed.message.content, summed.finish_reason) == (choice["message"]["content"], choice["finish_reason"])


def test_a_choice_with_calls_still_has_all_its_token_ids(demo: Tokenizer) -> None:
    parsed = request_of(demo, OutputFormat(AUTO), return_token_ids=True)
    ids = demo.encode(CALLS)
    assert whole(demo, parsed, ids)["choices"][0]["token_ids"] == ids
    chunks = streamed(demo, parsed, ids)[:-1]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == ids


def test_a_choice_with_calls_and_reasoning_has_the_log_probabilities_of_all_its_tokens(demo: Tokenizer) -> None:
    parsed = request_of(demo, OutputFormat(AUTO, "maybe"), logprobs=True)
    ids = demo.encode(f"<think>why</think>{CALLS}")
    one = TokenLogprobs(-0.5, 1, [])
    (choice,) = whole(demo, parsed, ids, logprobs=one)["choices"]
    assert len(choice["logprobs"]["content"]) == len(ids)
    chunks = streamed(demo, parsed, ids, logprobs=one)[:-1]
    said = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", ())]
    assert said == choice["logprobs"]["content"]
    assert bytes(byte for entry in said for byte in entry["bytes"]).decode() == demo.decode(
        ids, skip_special_tokens=True
    )
