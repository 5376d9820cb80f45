"""More requests than the system can take: who is refused and how, who is served next, and nothing is left behind.

What each test shows is behaviour, not speed: decode runs one sequence at a time, so that a long answer blocks the rest.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.system.harness import System, eventually
from tests.system.tiny_model import random_prompt

pytestmark = pytest.mark.timeout(300, method="signal")

MAX_QUEUE = 40
QUEUE_TIMEOUT_S = 8.0
BLOCKING_TOKENS = 8000
BLOCKING_PRIORITY = -10  # ahead of all others
NUM_QUEUED = 100
NUM_FLOOD = 2000
MB = 1 << 20
SMALL = ("--check-invariants", "--kv-blocks", 1024, "--prefill-kv-blocks", 1024)
"""Checking invariants takes as long as there are blocks."""


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[System]:
    """Runs one request at a time and lets few wait, briefly."""
    flags = ("--max-sequences", 1, "--max-queue", MAX_QUEUE, "--queue-timeout-s", QUEUE_TIMEOUT_S)
    with System(tiny, *flags, *SMALL, "--local-prefill", "never") as system:
        yield system


class Visitors:
    """Clients that come from an address of their own (all of 127.0.0.0/8 is this machine): each is another client."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._sessions: dict[str, httpx.AsyncClient] = {}

    async def __aenter__(self) -> Visitors:
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions.values():
            await session.aclose()

    async def ask(self, address: str, prompt: list[int], max_tokens: int, **fields: Any) -> httpx.Response:
        if address not in self._sessions:
            transport = httpx.AsyncHTTPTransport(local_address=address, limits=httpx.Limits(max_connections=None))
            self._sessions[address] = httpx.AsyncClient(transport=transport, timeout=120, base_url=self._system.url)
        body = {
            "model": self._system.client.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True,
            "temperature": 0, **fields,
        }  # fmt: skip
        return await self._sessions[address].post("/v1/completions", json=body)


def queued(system: System) -> int:
    number: int = system.client.get("/pools").json()["queued"]
    return number


def in_order_of_their_ends(system: System, responses: list[httpx.Response]) -> list[httpx.Response]:
    """As the gateway has logged it: a client that is slow may read several at once."""
    ids = [response.headers["x-request-id"] for response in responses]
    eventually(lambda: all(f"id={request} " in system.stderr for request in ids), 10, "all of them are logged")
    log = system.stderr
    return sorted(responses, key=lambda response: log.index(f"id={response.headers['x-request-id']} "))


async def until_queued(system: System, number: int, timeout_s: float = 20.0) -> None:
    await asyncio.to_thread(
        eventually, lambda: queued(system) >= number, timeout_s, f"{number} requests wait in the gateway's queue"
    )


async def block(visitors: Visitors, system: System, address: str = "127.0.0.1") -> list[asyncio.Task[None]]:
    """Fill every place that decode and prefill have, so that whoever comes now waits in the gateway, until `leave`."""

    async def occupy(seed: int) -> None:
        while True:  # also where the longest answer takes less time than a test
            response = await visitors.ask(address, random_prompt(seed, 20), BLOCKING_TOKENS, priority=BLOCKING_PRIORITY)
            if response.status_code != 200:
                await asyncio.sleep(0.1)

    tasks = []
    while queued(system) == 0:
        tasks.append(asyncio.create_task(occupy(1000 + len(tasks))))
        await asyncio.sleep(0.3)
        assert len(tasks) < 20, "the places are bounded"
    return tasks


async def leave(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_queue_is_bounded_and_its_time_limit_is_kept_and_both_say_when_to_come_back(narrow: System) -> None:
    async def scenario() -> None:
        async with Visitors(narrow) as visitors:
            blocking = await block(visitors, narrow)
            flood = [
                asyncio.create_task(visitors.ask("127.0.0.1", random_prompt(seed, 10), 5))
                for seed in range(MAX_QUEUE + 20)
            ]
            done = await asyncio.gather(*flood)
            await leave(blocking)
            full = [r for r in done if r.status_code == 429]
            late = [r for r in done if r.status_code == 503]
            assert len(full) >= 20
            assert len(late) >= MAX_QUEUE - 5
            assert {error_of(r) for r in full} == {(429, "queue_full")}
            assert {error_of(r) for r in late} == {(503, "queue_timeout")}
            assert all(1 <= int(r.headers["retry-after"]) <= 60 for r in full + late)
            assert max(r.elapsed.total_seconds() for r in full) < QUEUE_TIMEOUT_S, "a refusal does not wait"
            assert min(r.elapsed.total_seconds() for r in late) >= QUEUE_TIMEOUT_S - 0.5

    asyncio.run(scenario())
    narrow.assert_idle()


def test_lower_priority_value_is_served_earlier_whatever_came_first(narrow: System) -> None:
    async def scenario() -> dict[int, httpx.Response]:
        async with Visitors(narrow) as visitors:
            blocking = await block(visitors, narrow)
            before, waiting = queued(narrow), {}
            for priority in (3, 1, 4, 0, 2):
                asking = visitors.ask("127.0.0.1", random_prompt(priority, 10), 4, priority=priority)
                waiting[priority] = asyncio.create_task(asking)
                await until_queued(narrow, before + len(waiting))
            await leave(blocking)
            return {priority: await task for priority, task in waiting.items()}

    answers = asyncio.run(scenario())
    assert {answer.status_code for answer in answers.values()} == {200}
    order = in_order_of_their_ends(narrow, list(answers.values()))
    assert order == [answers[priority] for priority in range(5)]
    narrow.assert_idle()


@pytest.fixture(scope="module")
def wide(tiny: Path) -> Iterator[System]:
    """Lets thousands wait."""
    with System(tiny, "--max-sequences", 4, "--max-queue", 4096, *SMALL) as system:
        yield system


def test_second_client_is_served_while_the_first_one_floods(wide: System) -> None:
    async def scenario() -> tuple[list[httpx.Response], httpx.Response]:
        async with Visitors(wide) as visitors:
            blocking = await block(visitors, wide)
            before = queued(wide)
            asking = (visitors.ask("127.0.0.2", random_prompt(seed, 10), 60) for seed in range(NUM_QUEUED))
            flood = [asyncio.create_task(answer) for answer in asking]
            await until_queued(wide, before + NUM_QUEUED)
            second = asyncio.create_task(visitors.ask("127.0.0.3", random_prompt(5000, 10), 60))
            await until_queued(wide, before + NUM_QUEUED + 1)
            await leave(blocking)
            return await asyncio.gather(*flood), await second

    first, second = asyncio.run(scenario())
    assert {answer.status_code for answer in (*first, second)} == {200}
    order = in_order_of_their_ends(wide, [*first, second])
    assert order.index(second) < NUM_QUEUED // 5, "those that get the first places, and one or two more"
    wide.assert_idle()


async def send(system: System, seed: int) -> asyncio.StreamWriter:
    body = json.dumps({"model": system.client.model, "prompt": random_prompt(seed, 200), "max_tokens": 500}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", system.port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
    return writer


def test_two_thousand_clients_that_wait_and_leave_at_once_cost_little_and_leave_nothing(wide: System) -> None:
    gateway = next(p for p in wide.processes() if "pdserve.gateway" in p.cmdline())
    probe = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = wide.client.complete(random_prompt(1, 50), **probe)

    async def come_and_go() -> float:
        writers = await asyncio.gather(*(send(wide, seed) for seed in range(NUM_FLOOD)))
        await until_queued(wide, NUM_FLOOD * 9 // 10, 60.0)
        longest_s = 0.0
        for _ in range(20):
            started = time.monotonic()
            assert (await asyncio.to_thread(wide.client.get, "/health")).status_code == 200
            longest_s = max(longest_s, time.monotonic() - started)
        assert queued(wide) > NUM_FLOOD // 2, "and they wait all the while"
        for writer in writers:
            writer.transport.abort()
        return longest_s

    def rss_mb() -> float:
        return float(psutil.Process(gateway.pid).memory_info().rss) / MB

    asyncio.run(come_and_go())
    wide.assert_idle(20.0)
    first = rss_mb()
    longest_s = asyncio.run(come_and_go())
    assert longest_s < 10.0, "the gateway answers others meanwhile"
    eventually(lambda: queued(wide) == 0, 10.0, "whoever left does not wait any more")
    wide.assert_idle(20.0)
    assert rss_mb() - first < 60, f"{first:.0f} MB after the first time, {rss_mb():.0f} MB after the second"
    assert wide.client.complete(random_prompt(1, 50), **probe).choices == expected.choices
