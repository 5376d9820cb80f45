"""OpenAI's own Python library: what works there works for most of what is written in Python."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.clients.conftest import HURRIED_KEY, KEY, MODEL, QUESTION, TIMEOUT_S, TOKENS, Served
from tests.exact.reference import Reference, demo_tokenizer, template_ids

pytestmark = pytest.mark.timeout(200, method="signal")

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as made:
        yield made


def test_chat_gives_the_reference_answer_with_usage(client: openai.OpenAI, golden: str) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=TOKENS, temperature=0)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert choice.message.role == "assistant"
    assert choice.message.content == golden
    assert choice.message.refusal is None
    assert not choice.message.tool_calls
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    prompt_tokens = len(template_ids([{"role": "user", "content": QUESTION}]))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, TOKENS)
    assert answer.usage.total_tokens == prompt_tokens + TOKENS


def test_streamed_chat_adds_up_to_the_reference_answer_and_ends_in_usage(client: openai.OpenAI, golden: str) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert {chunk.id for chunk in chunks} == {last.id}
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == golden
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == TOKENS


def test_without_include_usage_no_chunk_carries_any(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, stream=True)
    chunks = list(stream)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


def test_stream_helper_collects_the_same_completion(client: openai.OpenAI, golden: str) -> None:
    ask = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    stop = golden[60:64]
    with client.chat.completions.stream(**ask, stop=stop) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == golden[: golden.index(stop)]
    assert len(deltas) > 5
    assert final.choices[0].message.content == "".join(deltas)
    assert final.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**ask, max_tokens=5) as cut, pytest.raises(openai.LengthFinishReasonError):
        cut.get_final_completion()


async def test_async_client_runs_many_at_once(served: Served, golden: str) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:

        async def whole() -> str:
            answer = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=TOKENS, temperature=0
            )
            return answer.choices[0].message.content or ""

        async def streamed() -> str:
            text = ""
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=TOKENS, temperature=0, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            return text

        answers = await asyncio.gather(*(ask() for ask in (whole, streamed) * 4))
    assert answers == [golden] * 8


def test_closing_a_stream_early_frees_everything(client: openai.OpenAI, served: Served) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=400, stream=True)
    for number, _ in enumerate(stream):
        if number == 3:
            stream.close()
            break
    served.system.assert_idle(2.0)
    assert served.system.metric("pdserve_requests_total", outcome="disconnect") >= 1


def test_completions_of_text_tokens_and_batches_agree(client: openai.OpenAI, reference: Reference) -> None:
    texts = ["The capital of France is", "Water boils at"]
    ids = [demo_tokenizer()(text).input_ids for text in texts]
    expected = [demo_tokenizer().decode(reference.output(prompt, 8), skip_special_tokens=True) for prompt in ids]
    for prompt in (texts, ids):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
        assert answer.object == "text_completion"
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    alone = [client.completions.create(model=MODEL, prompt=p, max_tokens=8, temperature=0) for p in (texts[0], ids[0])]
    assert [answer.choices[0].text for answer in alone] == [expected[0]] * 2
    echoed = client.completions.create(model=MODEL, prompt=texts[0], max_tokens=8, temperature=0, echo=True)
    assert echoed.choices[0].text == texts[0] + expected[0]
    stream = client.completions.create(model=MODEL, prompt=texts[0], max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0]


def test_seed_repeats_choices_that_differ_among_themselves(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=TOKENS, temperature=1.0, n=2, seed=seed
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.message.content for choice in answer.choices]

    first = ask(5)
    assert first[0] != first[1]
    assert ask(5) == first
    assert ask(6) != first


@pytest.mark.parametrize("as_list", [True, False])
def test_stop_string_ends_the_text_and_is_not_in_it(client: openai.OpenAI, golden: str, as_list: bool) -> None:
    stop = golden[20:24]
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=TOKENS, temperature=0, stop=[stop, "\x00"] if as_list else stop
    )
    assert answer.choices[0].message.content == golden[: golden.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    (card,) = client.models.list()
    assert card == client.models.retrieve(MODEL)
    assert (card.id, card.object) == (MODEL, "model")


def test_errors_are_the_exceptions_that_the_library_documents(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert wrong.value.param == "temperature"
    assert wrong.value.type == "invalid_request_error"
    assert wrong.value.request_id
    with pytest.raises(openai.BadRequestError, match="8192") as long:
        client.completions.create(model=MODEL, prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="someone-elses", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("someone-elses")
    with pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="a river")
    with pytest.raises(openai.AuthenticationError) as stranger:
        client.with_options(api_key="pds-of-nobody").models.list()
    assert stranger.value.code == "invalid_api_key"
    hurried = client.with_options(api_key=HURRIED_KEY)
    hurried.completions.create(model=MODEL, prompt="One", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as limited:
        hurried.completions.create(model=MODEL, prompt="Two", max_tokens=1)
    assert limited.value.code == "rate_limit_exceeded"
    assert int(limited.value.response.headers["retry-after"]) > 30
    with pytest.raises(openai.BadRequestError):  # a stream that is refused is refused before it begins
        client.chat.completions.create(model=MODEL, messages=MESSAGES, n=0, stream=True)


def test_raw_response_shows_the_request_id_that_was_sent(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="x", max_tokens=1, extra_headers={"x-request-id": "my-own-id"}
    )
    assert raw.headers["x-request-id"] == "my-own-id"
    assert raw.parse().choices[0].finish_reason == "length"


def test_fields_of_other_servers_pass_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=6, temperature=0, extra_body={"return_token_ids": True, "top_k": 1}
    )
    extra = answer.choices[0].model_extra
    assert extra is not None
    assert len(extra["token_ids"]) == 6
