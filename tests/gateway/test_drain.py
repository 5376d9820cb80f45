"""Requests whose worker drains: they move or finish, and nobody sees a seam."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.serving import pairs
from pdserve.transfer.messages import Failed, Prefill, Reserve
from tests.gateway.harness import System, expected, running_system, until


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with running_system(tmp_path) as system:
        yield system


@pytest.mark.parametrize("n", [1, 3])
async def test_stream_moves_to_another_decode_worker_without_a_token_lost_or_twice(system: System, n: int) -> None:
    first = system.decode("d0", token_interval_s=0.01)
    await system.ready(1)
    request, sink = system.request(max_tokens=60, n=n)
    task = asyncio.create_task(request.run())
    await until(lambda: len(sink.tokens.get(0, [])) > 5)
    second = system.decode("d1", token_interval_s=0.01)
    await system.ready(2)
    first.draining = True
    await task
    assert sink.tokens == dict.fromkeys(range(n), expected(40, 60))
    assert system.retries == ["drained"]
    assert request.attempt == 2
    (resumed,) = second.of(Reserve)
    assert all(len(output) > 5 for output in resumed.outputs)
    await system.idle()


async def test_stream_that_moves_again_and_again_is_never_counted_as_failing(system: System) -> None:
    decodes = [system.decode(f"d{i}", token_interval_s=0.01) for i in range(2)]
    await system.ready(2)
    request, sink = system.request(max_tokens=900)
    task = asyncio.create_task(request.run())
    for move in range(1, 8):
        await until(lambda: any(d.started for d in decodes if not d.draining))
        holder = next(d for d in decodes if d.started and not d.draining)
        holder.draining = True
        await until(lambda move=move: request.attempt > move)
        await until(lambda holder=holder: not holder.live)
        holder.leave()
        await until(lambda holder=holder: holder.worker not in system.pool.workers)
        decodes.append(system.decode(f"d{len(decodes)}", token_interval_s=0.01))
        await system.ready(2)
    request_tokens = len(sink.tokens[0])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert system.retries == ["drained"] * 7
    assert sink.tokens[0] == expected(40, request_tokens)


async def test_last_decode_worker_finishes_its_stream_and_takes_nothing_new(system: System) -> None:
    decode = system.decode(token_interval_s=0.01)
    await system.ready(1)
    request, sink = system.request(max_tokens=60)
    task = asyncio.create_task(request.run())
    await until(lambda: sink.tokens)
    decode.draining = True
    await until(lambda: not system.dispatcher.can_serve)
    late, _ = system.request()
    with pytest.raises(ApiError) as refused:
        await late.run()
    assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "1"})
    await task
    assert sink.tokens == {0: expected(40, 60)}
    assert system.retries == []


async def test_stream_of_a_worker_that_leaves_before_it_is_through_goes_on_when_another_one_comes(
    system: System,
) -> None:
    decode = system.decode("d0", token_interval_s=0.01)
    await system.ready(1)
    request, sink = system.request(max_tokens=60)
    task = asyncio.create_task(request.run())
    await until(lambda: sink.tokens)
    decode.draining = True
    await until(lambda: not system.dispatcher.can_serve)
    decode.leave()
    decode.kill()
    await until(lambda: not system.pool.workers)
    system.decode("d0")
    await task
    assert sink.tokens == {0: expected(40, 60)}
    assert system.retries == ["drained"]


async def test_prompt_at_a_draining_prefill_worker_is_finished_there_and_the_next_goes_elsewhere(
    system: System,
) -> None:
    decode, first = await system.pair()
    second = system.prefill("p1")
    await system.linked(2)
    first.answering = second.answering = False
    request, _ = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: first.of(Prefill) or second.of(Prefill))
    holder, other = (first, second) if first.of(Prefill) else (second, first)
    holder.draining = True
    await until(lambda: len(pairs(system.pool.of("m"), alone=True)) == 1)
    await asyncio.sleep(0.3)
    assert request.attempt == 1
    decode.start((request.id, 1))
    await task
    other.answering = True
    following, sink = system.request()
    await following.run()
    assert sink.tokens == {0: expected(40, 10)}
    assert len(other.of(Prefill)) == 1
    assert len(holder.of(Prefill)) == 1


async def test_refusal_of_a_worker_that_began_to_drain_meanwhile_is_no_failure_of_the_request(system: System) -> None:
    first = system.decode("d0", answering=False)
    await system.ready(1)
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: first.of(Reserve))
    second = system.decode("d1")
    await system.ready(2)
    key = (request.id, 1)
    first.live.discard(key)
    first.dealer.send(Failed(*key, "draining", "d0 drains", True))
    first.draining = True
    await task
    assert sink.tokens == {0: expected(40, 10)}
    assert system.retries == ["drained"]
    assert len(second.of(Reserve)) == 1


async def test_new_request_goes_to_the_only_worker_whose_pool_can_ever_hold_it(system: System) -> None:
    small = system.decode("d0", num_blocks=2)
    large = system.decode("d1")
    await system.ready(2)
    for _ in range(3):
        request, sink = system.request(prompt_tokens=40, max_tokens=10)
        await request.run()
        assert sink.tokens == {0: expected(40, 10)}
    assert small.of(Reserve) == []
    assert len(large.of(Reserve)) == 3
