"""OpenAI's client with tools, on a running system with the demo model, which hardly knows what a tool is."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.exact.reference import demo_tokenizer
from tests.system.harness import System

pytestmark = pytest.mark.timeout(300, method="signal")

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
ZONE = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "strict": True, "parameters": schema | {"additionalProperties": False}},
    }
    for name, schema in (("weather", CITY), ("time", ZONE))
]
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture
def client(demo_system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_system.client.url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


def both(client: openai.OpenAI, **fields: Any) -> Any:
    """The answer, which its stream, from the same seed, must add up to."""
    fields = {"model": "demo", "messages": ASKED, "temperature": 1.0, "seed": 5, "max_tokens": 8} | fields
    whole = client.chat.completions.create(**fields)
    texts, made, reasons = defaultdict(str), defaultdict(list), {}
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    made[choice.index].append((call.function.name, ""))
                name, arguments = made[choice.index][call.index]
                made[choice.index][call.index] = name, arguments + call.function.arguments
            reasons[choice.index] = choice.finish_reason
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        assert (texts[choice.index], made[choice.index]) == (choice.message.content or "", calls(choice))
        assert reasons[choice.index] == choice.finish_reason
    return whole


def calls(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def test_the_model_is_told_of_the_tools_and_its_answer_is_streamed_as_it_is_told(client: openai.OpenAI) -> None:
    told = both(client, tools=TOOLS)
    untold = both(client, tools=TOOLS, tool_choice="none")
    assert told.usage.prompt_tokens > untold.usage.prompt_tokens + 50


def test_a_conversation_goes_on_with_the_results_of_calls(client: openai.OpenAI, demo_system: System) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny, 24 degrees"},
    ]
    both(client, messages=history, tools=TOOLS)
    answer = demo_system.client.chat(history, max_tokens=1)
    prompt = demo_tokenizer().decode(answer.prompt_token_ids)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>' in prompt
    assert "<tool_response>\nsunny, 24 degrees\n</tool_response><|im_end|>" in prompt


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_even_a_tiny_model_makes_the_call_that_is_named(client: openai.OpenAI, temperature: float) -> None:
    named: Any = {"type": "function", "function": {"name": "time"}}
    (choice,) = both(client, tools=TOOLS, tool_choice=named, temperature=temperature, max_tokens=40).choices
    ((name, arguments),) = calls(choice)
    assert (name, choice.finish_reason, choice.message.content) == ("time", "stop", None)
    assert json.loads(arguments)["zone"] in ("UTC", "CET")


@pytest.mark.parametrize("parallel", [True, False])
def test_even_a_tiny_model_calls_where_it_is_required(client: openai.OpenAI, parallel: bool) -> None:
    answer = both(
        client, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel, temperature=0, max_tokens=60, n=2
    )
    for choice in answer.choices:
        made = calls(choice)
        assert (choice.finish_reason, choice.message.content) in (("tool_calls", None), ("length", None))
        assert len(made) == 1 or parallel
        for name, arguments in made if choice.finish_reason == "tool_calls" else made[:-1]:
            assert json.loads(arguments).keys() == {"city" if name == "weather" else "zone"}
