"""Clients that leave: nothing of their requests stays anywhere."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass

import pytest

from tests.system.harness import System

pytestmark = pytest.mark.timeout(300, method="signal")

NUM_CLIENTS = 100
ARRIVALS_S = 6.0
LONGEST_STAY_S = 5.0
PATIENCE_S = 120.0
MAX_TOKENS = 400
SEED = 20


@dataclass(frozen=True)
class Visit:
    """One client: when it comes, what it asks, how long it stays, how it leaves.

    `events`: leave when so many pieces of the text have come, however long that takes.
    """

    arrival_s: float
    stay_s: float
    events: int | None
    body: dict[str, object]
    abrupt: bool  # RST instead of FIN


@dataclass(frozen=True)
class Outcome:
    saw_the_end: bool
    received_bytes: int


def plan_visits(model: str) -> list[Visit]:
    rng = random.Random(SEED)
    visits = []
    for number in range(NUM_CLIENTS):
        body: dict[str, object] = {
            "model": model,
            "prompt": [rng.randrange(100, 40_000) for _ in range(rng.choice((3, 20, 60, 200)))],
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "n": rng.choice((1, 1, 1, 2)),
            "stream": number % 3 != 0,
        }
        reads = number % 5 == 1 and number % 3 != 0
        stay_s = PATIENCE_S if reads else rng.uniform(0, LONGEST_STAY_S)
        events = rng.randrange(1, 30) if reads else None
        visits.append(Visit(rng.uniform(0, ARRIVALS_S), stay_s, events, body, rng.random() < 0.5))
    return visits


async def pay_visit(port: int, visit: Visit) -> Outcome:
    await asyncio.sleep(visit.arrival_s)
    body = json.dumps(visit.body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
    received = b""
    try:
        async with asyncio.timeout(visit.stay_s):
            while piece := await reader.read(65_536):
                received += piece
                if visit.events is not None and received.count(b"data: ") >= visit.events:
                    break
    except TimeoutError:
        pass
    if visit.abrupt:
        writer.transport.abort()
    else:
        writer.close()
    assert not received or received.startswith(b"HTTP/1.1 200"), received[:300]
    return Outcome(b"data: [DONE]" in received, len(received))


async def pay_visits(port: int, visits: list[Visit]) -> list[Outcome]:
    return await asyncio.gather(*(pay_visit(port, visit) for visit in visits))


def test_clients_that_leave_at_random_moments_leave_nothing_behind(demo_system: System) -> None:
    ask = {"max_tokens": 12, "temperature": 0}
    expected = demo_system.client.complete("The tide was out and", **ask)
    pids = demo_system.pids("prefill") | demo_system.pids("decode")
    visits = plan_visits(demo_system.client.model)
    outcomes = asyncio.run(pay_visits(demo_system.port, visits))
    demo_system.assert_idle()
    assert demo_system.pids("prefill") | demo_system.pids("decode") == pids, "no worker was lost over it"
    readers = [outcome for visit, outcome in zip(visits, outcomes, strict=True) if visit.events is not None]
    assert len(readers) > 10
    assert not any(outcome.saw_the_end for outcome in readers), "they left in the middle of their text"
    assert all(outcome.received_bytes > 0 for outcome in readers)
    assert sum(outcome.received_bytes == 0 for outcome in outcomes) > NUM_CLIENTS // 10, "some left before it began"
    assert demo_system.client.complete("The tide was out and", **ask).choices == expected.choices
