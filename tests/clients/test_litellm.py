"""LiteLLM's provider for OpenAI-compatible servers: the way in of most proxies and agents."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from tests.clients.conftest import KEY, MODEL, QUESTION, TIMEOUT_S, TOKENS, Served
from tests.clients.shapes import RIVER_QUESTION, WEATHER_QUESTION, River, Weather

pytestmark = pytest.mark.timeout(200, method="signal")

MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def settings(served: Served) -> dict[str, Any]:
    return {"api_base": served.base_url, "api_key": KEY, "num_retries": 0, "timeout": TIMEOUT_S, "temperature": 0}


def test_chat_gives_the_reference_answer_with_usage(settings: dict[str, Any], golden: str) -> None:
    answer = litellm.completion(f"openai/{MODEL}", MESSAGES, max_tokens=TOKENS, **settings)
    assert answer.choices[0].message.content == golden
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == TOKENS


def test_streamed_chat_adds_up_to_the_reference_answer(settings: dict[str, Any], golden: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(f"openai/{MODEL}", MESSAGES, max_tokens=TOKENS, **options, **settings))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == golden
    assert chunks[-1].usage.completion_tokens == TOKENS
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt is not None
    assert rebuilt.choices[0].message.content == golden


async def test_async_chat_and_text_completion(settings: dict[str, Any], golden: str) -> None:
    answer = await litellm.acompletion(f"openai/{MODEL}", MESSAGES, max_tokens=TOKENS, **settings)
    assert answer.choices[0].message.content == golden
    text = await litellm.atext_completion(
        model=f"text-completion-openai/{MODEL}", prompt="The capital of France is", max_tokens=4, **settings
    )
    assert "Paris" in text.choices[0].text


def test_errors_are_the_exceptions_that_the_library_documents(settings: dict[str, Any]) -> None:
    def ask(model: str = f"openai/{MODEL}", **changed: Any) -> None:
        litellm.completion(model, MESSAGES, **{"max_tokens": 2, **settings, **changed})

    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(temperature=3)
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(max_tokens=100_000)
    with pytest.raises(litellm.NotFoundError):
        ask("openai/someone-elses")
    with pytest.raises(litellm.AuthenticationError):
        ask(api_key="pds-of-nobody")


def test_structured_answer_and_tool_call(settings: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": RIVER_QUESTION}]
    answer = litellm.completion(f"openai/{MODEL}", messages, response_format=River, **settings)
    River.model_validate_json(answer.choices[0].message.content)
    tool = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    answer = litellm.completion(f"openai/{MODEL}", messages, tools=[tool], tool_choice="required", **settings)
    for call in answer.choices[0].message.tool_calls:
        assert call.function.name == "weather"
        Weather.model_validate_json(call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"
