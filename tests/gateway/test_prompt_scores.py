"""Log probabilities on their way through the gateway: each once, in order, whatever happens to attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.gateway.prompt_scores import PromptScores
from pdserve.transfer.messages import Cancel, FirstTokens, Prefill, Reserve
from tests.gateway.fake_worker import prompt_messages, said, token_at
from tests.gateway.harness import System, expected, running_system, until

PROMPT = list(range(1, 41))  # what System.request makes of 40 tokens
SCORES = [(0, [said(token).logprob for token in PROMPT[1:]])]


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with running_system(tmp_path) as system:
        yield system


def test_scores_are_taken_once_and_in_order() -> None:
    scores = PromptScores(5)
    a, b, c, d, e = (said(token) for token in range(10, 15))
    assert scores.take(1, [a, b])
    assert not scores.take(4, [d]), "token 3 is missing"
    assert scores.take(2, [b, c]), "b is here already"
    scores.restart()
    assert scores.entries == []
    assert scores.take(1, [a, b, c, d, e])
    assert scores.complete
    assert scores.take(1, [a, b])
    assert not scores.take(6, [a]), "the prompt has no such token"
    scores.restart()
    assert scores.entries == [a, b, c, d, e]


async def test_tokens_and_prompt_come_with_what_the_workers_say(system: System) -> None:
    await system.pair()
    request, sink = system.request(logprobs=0, prompt_logprobs=0, n=2)
    await request.run()
    assert sink.prompts == SCORES
    assert sink.logprobs == {choice: [said(token) for token in expected(40, 10)] for choice in (0, 1)}
    await system.idle()


async def test_decode_alone_scores_the_prompt_too(system: System) -> None:
    system.decode()
    await system.ready(1)
    request, sink = system.request(prompt_logprobs=0)
    await request.run()
    assert sink.prompts == SCORES
    assert sink.tokens == {0: expected(40, 10)}


async def test_tokens_that_overtake_the_prompts_scores_wait_for_them(system: System) -> None:
    decode, prefill = await system.pair()
    prefill.answering = False
    request, sink = system.request(prompt_logprobs=0, logprobs=1)
    task = asyncio.create_task(request.run())
    await until(lambda: prefill.of(Prefill))
    key = request.id, request.attempt
    decode.start(key)
    await until(lambda: request.choices[0].early)
    assert not sink.tokens
    for message in prompt_messages(*key, PROMPT):
        prefill.dealer.send(message)
    prefill.dealer.send(FirstTokens(*key, 0, 0, [token_at(40)], 0, 0.0, 0.0, [said(token_at(40))]))
    await task
    assert sink.prompts == SCORES
    assert sink.tokens == {0: expected(40, 10)}
    assert system.retries == []


@pytest.mark.parametrize("lost", [1, 3])
async def test_lost_scores_cost_an_attempt_and_are_computed_anew(system: System, lost: int) -> None:
    decode, prefill = await system.pair()
    prefill.leaving_out = lost
    request, sink = system.request(prompt_logprobs=0)
    await request.run()
    assert sink.prompts == SCORES
    assert sink.tokens == {0: expected(40, 10)}
    assert system.retries == ["failed"]
    assert [m.params.prompt_logprobs for m in decode.of(Reserve)] == [0, 0]


async def test_a_prompt_that_was_scored_is_not_scored_again_when_its_decode_worker_dies(system: System) -> None:
    decode, _ = await system.pair()
    decode.stop_after = 4
    request, sink = system.request(prompt_logprobs=0, logprobs=0)
    task = asyncio.create_task(request.run())
    await until(lambda: len(sink.tokens.get(0, [])) == 4)
    other = system.decode("d1")
    await system.linked(2)
    decode.kill()
    await task
    assert sink.prompts == SCORES
    assert sink.tokens == {0: expected(40, 10)}
    assert sink.logprobs == {0: [said(token) for token in expected(40, 10)]}
    assert [m.params.prompt_logprobs for m in other.of(Reserve)] == [None]


async def test_a_prompt_alone_is_scored_and_then_nobody_works_on_it(system: System) -> None:
    decode, _ = await system.pair()
    request, sink = system.request(max_tokens=0, prompt_logprobs=0, n=2)
    await request.run()
    assert (sink.prompts, sink.tokens, sink.finishes) == (SCORES, {}, {0: "length", 1: "length"})
    await until(lambda: decode.of(Cancel))
    await system.idle()


async def test_nothing_is_asked_of_a_worker_for_a_prompt_that_is_only_repeated(system: System) -> None:
    request, sink = system.request(max_tokens=0)
    await request.run()
    assert (sink.tokens, sink.finishes, request.attempt) == ({}, {0: "length"}, 0)


async def test_a_token_without_its_log_probability_is_not_believed(system: System) -> None:
    decode, prefill = await system.pair()
    prefill.answering = False
    request, sink = system.request(logprobs=0)
    task = asyncio.create_task(request.run())
    await until(lambda: prefill.of(Prefill))
    prefill.answering = True
    prefill.dealer.send(FirstTokens(request.id, 1, 0, 0, [token_at(40)], 0, 0.0, 0.0))
    await task
    assert system.retries == ["failed"]
    assert sink.logprobs == {0: [said(token) for token in expected(40, 10)]}
    assert decode.of(Cancel)
