"""How much is sent to workers at once, who is refused before any work is spent, and what a refusal says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.dispatch import BACKLOG_PROMPTS, Objectives
from pdserve.transfer.messages import FirstTokens, Prefill, Reserve
from tests.gateway.fake_worker import FakePrefill, token_at
from tests.gateway.harness import System, expected, running_system, until

Tasks = list[asyncio.Task[None]]


@asynccontextmanager
async def open_requests(system: System, *prompt_tokens: int, client: str = "") -> AsyncIterator[Tasks]:
    """One request with each of these prompts under way; cancelled at the end, when nothing may be left of them."""
    requests = [system.request(prompt_tokens=count, client=client)[0] for count in prompt_tokens]
    tasks = [asyncio.create_task(request.run()) for request in requests]
    try:
        await system.settled()
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await system.idle()


async def refusal(system: System, **fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await system.request(**fields)[0].run()
    return caught.value


def finish_prefill(prefill: FakePrefill, number: int) -> None:
    """Its `number`th prompt is computed now."""
    message = prefill.of(Prefill)[number]
    key = message.request, message.attempt
    prefill.dealer.send(FirstTokens(*key, 0, 0, [token_at(len(message.prompt))], 0, 0.0, 0.0))


async def test_prompts_beyond_those_that_keep_prefill_busy_wait_in_the_queue(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never") as system:
        decode, prefill = await system.pair()
        prefill.answering = False
        async with open_requests(system, *[40] * 6):
            assert len(prefill.of(Prefill)) == BACKLOG_PROMPTS
            assert len(decode.of(Reserve)) == BACKLOG_PROMPTS, "decode holds no blocks for the others"
            assert len(system.dispatcher.queue) == 6 - BACKLOG_PROMPTS
            finish_prefill(prefill, 0)
            await until(lambda: len(prefill.of(Prefill)) > BACKLOG_PROMPTS)


async def test_short_prompts_of_a_client_wait_neither_in_the_queue_nor_behind_long_ones(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never") as system:
        _, prefill = await system.pair()
        prefill.answering = False
        async with open_requests(system, *[400] * 4, *[20] * 3, 200):
            sent = [len(message.prompt) for message in prefill.of(Prefill)]
            assert sent == [400] * BACKLOG_PROMPTS + [20] * BACKLOG_PROMPTS, "and of either only what keeps it busy"
            finish_prefill(prefill, 0)
            await until(lambda: len(prefill.of(Prefill)) >= 2 * BACKLOG_PROMPTS + 2)
            assert [len(message.prompt) for message in prefill.of(Prefill)[2 * BACKLOG_PROMPTS :]][:2] == [20, 200]


async def test_fast_prefill_gets_as_many_prompts_as_it_computes_in_a_moment(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never") as system:
        _, prefill = await system.pair()
        worker = system.pool.workers[prefill.worker]
        for number in range(10):
            worker.pace.computed(1000, float(number), number + 1.0)  # 1,000 tokens a second: 250 in the backlog
        prefill.answering = False
        async with open_requests(system, *[40] * 12):
            assert len(prefill.of(Prefill)) == 7, "6 of 40 tokens are less than 250, 7 are more"


async def test_request_that_would_start_too_late_is_refused_before_any_work_is_spent(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never", objectives=Objectives(ttft_s=2.0)) as system:
        decode, prefill = await system.pair()
        worker = system.pool.workers[prefill.worker]
        for number in range(10):
            worker.pace.computed(10, float(number), number + 1.0)  # 10 tokens a second
        prefill.answering = False
        async with open_requests(system, 10):
            error = await refusal(system, prompt_tokens=70)
            assert (error.status, error.code, error.headers["Retry-After"]) == (503, "overloaded", "7")
            assert len(decode.of(Reserve)) == 1
        async with open_requests(system, 10, 5):
            assert len(prefill.of(Prefill)) == 3, "a shorter one is in time"


async def test_idle_worker_gets_a_request_however_slow_it_was(tmp_path: Path) -> None:
    """Else one bad moment would be the last: what is never tried is never measured again."""
    async with running_system(tmp_path, objectives=Objectives(ttft_s=2.0, tpot_s=0.01)) as system:
        await system.pair()
        for worker in system.pool.workers.values():
            for number in range(10):
                worker.pace.computed(1, 100.0 * number, 100.0 * number + 99.0)
                worker.pace.stepped(frozenset({"a"}), 100.0 * number)
        request, sink = system.request(max_tokens=3)
        await request.run()
        assert sink.tokens == {0: expected(40, 3)}


async def test_request_that_has_waited_too_long_to_start_in_time_is_refused_then(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never", objectives=Objectives(ttft_s=0.5)) as system:
        _, prefill = await system.pair()
        prefill.answering = False
        async with open_requests(system, *[40] * BACKLOG_PROMPTS):
            started = asyncio.get_running_loop().time()
            error = await refusal(system)
            assert (error.status, error.code) == (503, "overloaded")
            assert int(error.headers["Retry-After"]) >= 1
            assert asyncio.get_running_loop().time() - started < 10.0, "long before the queue's time limit"


async def test_decode_runs_no_more_at_once_than_get_their_tokens_in_time(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never", objectives=Objectives(tpot_s=0.05)) as system:
        decode, prefill = await system.pair()
        decode.stop_after = 1
        worker = system.pool.workers[decode.worker]
        for number in range(100):
            worker.pace.stepped(frozenset({"a", "b"}), 0.03 * number)  # 30 ms for two: 45 for three, 60 for four
        async with open_requests(system, *[40] * 6):
            await until(lambda: len(prefill.of(Prefill)) == 3)
            assert len(system.dispatcher.queue) == 3


async def test_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never", max_queue=1) as system:
        _, prefill = await system.pair()
        prefill.answering = False
        async with open_requests(system, *[40] * (BACKLOG_PROMPTS + 1)):
            error = await refusal(system)
            assert (error.status, error.code) == (429, "queue_full")
            assert 1 <= int(error.headers["Retry-After"]) <= 60


async def test_time_limit_of_the_queue_is_kept_and_says_when_to_come_back(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never", queue_timeout_s=1.5) as system:
        decode, prefill = await system.pair()
        prefill.answering = False
        async with open_requests(system, *[40] * BACKLOG_PROMPTS):
            asked = len(decode.of(Reserve))
            error = await refusal(system)
            assert (error.status, error.code) == (503, "queue_timeout")
            assert 1 <= int(error.headers["Retry-After"]) <= 60
            finish_prefill(prefill, 0)
            await system.settled()
            assert len(decode.of(Reserve)) == asked, "what ran out of time is never sent anywhere"


async def test_quiet_client_is_served_next_while_another_one_has_many_waiting(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never") as system:
        _, prefill = await system.pair()
        prefill.answering = False
        async with open_requests(system, *[40] * 50, client="busy"):
            quiet = asyncio.create_task(system.request(client="quiet", prompt_tokens=17)[0].run())
            await system.settled()
            for number in range(2):
                finish_prefill(prefill, number)
                await until(lambda wanted=BACKLOG_PROMPTS + number + 1: len(prefill.of(Prefill)) >= wanted)
            assert 17 in [len(message.prompt) for message in prefill.of(Prefill)[: BACKLOG_PROMPTS + 2]]
            quiet.cancel()
            await asyncio.gather(quiet, return_exceptions=True)


async def test_client_that_goes_away_leaves_nothing_in_the_queue(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never", max_queue=3000) as system:
        decode, prefill = await system.pair()
        prefill.answering = False
        async with open_requests(system, *[100] * 2000) as tasks:
            assert len(system.dispatcher.queue) == 2000 - BACKLOG_PROMPTS
            loop = asyncio.get_running_loop()
            started = loop.time()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert loop.time() - started < 15.0
            assert len(system.dispatcher.queue) == 0
        assert len(decode.of(Reserve)) == BACKLOG_PROMPTS
