"""OpenAI's Python library where the answer has a shape: parsed objects, tool calls, log probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import openai
import pytest
from openai.lib._tools import pydantic_function_tool
from openai.types.chat import ChatCompletionMessageParam

from tests.clients.conftest import KEY, MODEL, QUESTION, TIMEOUT_S, TOKENS, Served
from tests.clients.shapes import RIVER_QUESTION, WEATHER_QUESTION, Clock, River, Weather
from tests.exact.reference import demo_tokenizer

pytestmark = pytest.mark.timeout(200, method="signal")

RIVER: list[ChatCompletionMessageParam] = [{"role": "user", "content": RIVER_QUESTION}]
WEATHER: list[ChatCompletionMessageParam] = [{"role": "user", "content": WEATHER_QUESTION}]
TOOLS = [pydantic_function_tool(Weather), pydantic_function_tool(Clock)]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as made:
        yield made


# --- structured output -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_parse_gives_an_object_of_the_class(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=RIVER, response_format=River, temperature=temperature, seed=3, n=2
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, River)
        assert choice.finish_reason == "stop"


def test_streamed_parse_gives_the_same_object_as_a_whole_one(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "messages": RIVER, "response_format": River, "temperature": 0}
    with client.chat.completions.stream(**ask) as stream:
        snapshots = [event.parsed for event in stream if event.type == "content.delta"]
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(streamed, River)
    assert streamed == client.chat.completions.parse(**ask).choices[0].message.parsed
    assert any(snapshot != snapshots[-1] for snapshot in snapshots), "it grew while it came"


def test_json_object_mode_gives_json(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Give me a JSON object with one short key."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=200,
    )
    (choice,) = answer.choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    assert (choice.message.content or "").lstrip().startswith("{")


def test_an_answer_cut_short_is_the_exception_that_the_library_documents(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=RIVER, response_format=River, max_tokens=3)


# --- tools -----------------------------------------------------------------------------------------------------------


def test_required_call_is_of_one_of_the_tools_and_fits_its_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice="required", temperature=0
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert isinstance(call.function.parsed_arguments, {"Weather": Weather, "Clock": Clock}[call.function.name])
        assert call.id


@pytest.mark.parametrize("name", ["Weather", "Clock"])
def test_named_function_is_the_one_that_is_called(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=WEATHER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": name}},
        temperature=1.0,
        seed=11,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == name
    {"Weather": Weather, "Clock": Clock}[name].model_validate_json(call.function.arguments)
    assert answer.choices[0].finish_reason == "stop"


def test_streamed_call_is_the_same_as_the_whole_one(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "messages": WEATHER, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0]
    with client.chat.completions.stream(**ask) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    pairs = [
        [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        for choice in (whole, final)
    ]
    assert pairs[0] == pairs[1] != []
    assert len(deltas) > 3, "the arguments came in pieces"
    first = [delta for delta in deltas if delta.index == 0]
    assert "".join(delta.arguments_delta for delta in first) == pairs[0][0][1]


def test_auto_answers_in_words_or_with_a_whole_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice="auto", temperature=0, max_tokens=64
    )
    (choice,) = answer.choices
    if choice.finish_reason == "tool_calls":
        for call in choice.message.tool_calls or []:
            assert call.type == "function"
            assert call.function.name in ("Weather", "Clock")
    else:
        assert choice.message.content
        assert not choice.message.tool_calls


def test_result_of_a_call_goes_back_into_the_conversation(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "Weather"}}
    asked = client.chat.completions.create(model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice=named, temperature=0)
    message = asked.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4 degrees, rain"}
    after = client.chat.completions.create(
        model=MODEL, messages=[*WEATHER, message, result], tools=TOOLS, tool_choice="none", temperature=0, max_tokens=16
    )
    assert after.choices[0].message.content
    before = client.chat.completions.create(
        model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice="none", max_tokens=1
    )
    assert after.usage is not None
    assert before.usage is not None
    assert after.usage.prompt_tokens > before.usage.prompt_tokens + 10, "the model sees the call and its result"


# --- log probabilities -----------------------------------------------------------------------------------------------


def test_chat_logprobs_name_every_token_and_the_greedy_one_first(client: openai.OpenAI, golden: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=TOKENS,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert len(content) == TOKENS
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == golden
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-6


def test_completion_logprobs_with_echo_cover_the_prompt(client: openai.OpenAI) -> None:
    text = "The capital of France is"
    answer = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text == "".join(logprobs.tokens or []) == text
    assert len(logprobs.tokens or []) == len(demo_tokenizer()(text).input_ids)
    first, *rest = logprobs.token_logprobs or []
    assert first is None
    assert all(value is not None and value <= 0 for value in rest)
    streamed = client.completions.create(model=MODEL, prompt=text, max_tokens=4, logprobs=2, temperature=0, stream=True)
    entries = [
        value for chunk in streamed if (part := chunk.choices[0].logprobs) for value in part.token_logprobs or []
    ]
    assert len(entries) == 4
