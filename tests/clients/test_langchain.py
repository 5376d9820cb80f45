"""LangChain's ChatOpenAI."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

from tests.clients.conftest import KEY, MODEL, QUESTION, TIMEOUT_S, TOKENS, Served
from tests.clients.shapes import RIVER_QUESTION, WEATHER_QUESTION, Clock, River, Weather

pytestmark = pytest.mark.timeout(200, method="signal")


@pytest.fixture
def chat(served: Served) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=served.base_url,
        api_key=SecretStr(KEY),
        temperature=0,
        max_retries=0,
        timeout=TIMEOUT_S,
        stream_usage=True,
    ).model_copy(update={"max_tokens": TOKENS})


def test_invoke_gives_the_reference_answer_with_usage(chat: ChatOpenAI, golden: str) -> None:
    answer = chat.invoke(QUESTION)
    assert isinstance(answer, AIMessage)
    assert answer.content == golden
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == TOKENS
    assert answer.response_metadata["finish_reason"] == "length"


def test_stream_adds_up_to_the_same_message(chat: ChatOpenAI, golden: str) -> None:
    chunks = list(chat.stream([HumanMessage(QUESTION)]))
    assert len(chunks) > TOKENS // 2
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert isinstance(total, AIMessageChunk)
    assert total.content == golden
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == TOKENS


async def test_batches_and_histories_of_all_roles(chat: ChatOpenAI, golden: str) -> None:
    history = [SystemMessage("You are brief."), HumanMessage("Hello"), AIMessage("Hi."), HumanMessage(QUESTION)]
    first, second = await chat.abatch([QUESTION, history])
    assert first.content == golden
    assert second.content
    assert second.usage_metadata is not None
    assert first.usage_metadata is not None
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_text_completion(served: Served) -> None:
    model = OpenAI(model=MODEL, base_url=served.base_url, api_key=SecretStr(KEY), temperature=0, max_tokens=4)
    assert "Paris" in model.invoke("The capital of France is")


def test_bound_tool_is_called_and_its_arguments_fit(chat: ChatOpenAI) -> None:
    model = chat.model_copy(update={"max_tokens": 200}).bind_tools([Weather, Clock], tool_choice="required")
    answer = model.invoke(WEATHER_QUESTION)
    assert isinstance(answer, AIMessage)
    assert answer.tool_calls
    assert not answer.invalid_tool_calls
    for call in answer.tool_calls:
        {"Weather": Weather, "Clock": Clock}[call["name"]].model_validate(call["args"])
    total: AIMessageChunk | None = None
    for chunk in model.stream(WEATHER_QUESTION):
        assert isinstance(chunk, AIMessageChunk)
        total = chunk if total is None else total + chunk
    assert total is not None
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [(c["name"], c["args"]) for c in answer.tool_calls]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(chat: ChatOpenAI, method: str) -> None:
    model = chat.model_copy(update={"max_tokens": 200}).with_structured_output(River, method=method)
    assert isinstance(model.invoke(RIVER_QUESTION), River)
