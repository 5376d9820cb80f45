"""LangChain's ChatOpenAI."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

from tests.clients.conftest import KEY, MODEL, QUESTION, TIMEOUT_S, TOKENS, Served

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
