from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.gateway.limits import AdmissionQueue, QueueFull, Turn


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Places:
    """A number of places to take."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.asked = 0

    def pick(self) -> Place | None:
        self.asked += 1
        if self.free == 0:
            return None
        self.free -= 1
        return Place(self)


class Place:
    def __init__(self, places: Places) -> None:
        self._places = places

    def release(self) -> None:
        self._places.free += 1


def admit(
    queue: AdmissionQueue, places: Places, rank: float = 0.0, timeout_s: float = 5.0, known: bool = False
) -> asyncio.Task[Place]:
    return asyncio.create_task(queue.admit(Turn(rank, known=known), places.pick, timeout_s))


async def turns_of_the_loop(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Ask:
    """`at`: before which round it comes."""

    client: str
    cost: float = 1.0
    rank: float = 0.0
    at: int = 0


async def served(asks: list[Ask], rounds: int) -> list[Ask]:
    """One place is given in every round. In which order?"""
    queue, places, order = AdmissionQueue(10_000), Places(0), []

    async def wait(ask: Ask) -> None:
        await queue.admit(Turn(ask.rank, ask.client, ask.cost), places.pick, 60.0)
        order.append(ask)

    tasks: list[asyncio.Task[None]] = []
    for number in range(rounds):
        tasks += [asyncio.create_task(wait(ask)) for ask in asks if ask.at == number]
        await turns_of_the_loop()
        places.free = 1
        queue.wake()
        await turns_of_the_loop()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(queue) == 0
    return order


# --- places ----------------------------------------------------------------------------------------------------------


async def test_free_place_is_given_at_once():
    places = Places(1)
    await admit(AdmissionQueue(0), places)
    assert places.free == 0


async def test_places_are_given_in_rank_order_not_in_order_of_arrival():
    order = await served([Ask("c", rank=rank) for rank in (3.0, 1.0, 2.0)], 3)
    assert [ask.rank for ask in order] == [1.0, 2.0, 3.0]


async def test_nobody_passes_a_head_that_finds_no_place():
    queue = AdmissionQueue(10)
    head = admit(queue, Places(0), rank=1.0)
    await turns_of_the_loop()
    other = Places(1)
    second = admit(queue, other, rank=2.0)
    await turns_of_the_loop()
    assert not second.done()
    assert other.free == 1
    head.cancel()
    await turns_of_the_loop()
    assert second.done(), "the place is free for the next one once the head has gone"
    await end([head])


async def test_shortest_prompt_of_a_client_passes_a_head_that_finds_no_place_but_not_its_place():
    queue, for_long, for_short = AdmissionQueue(10), Places(0), Places(1)

    def wait(rank: float, length: int, places: Places, client: str = "c") -> asyncio.Task[Place]:
        turn = Turn(rank, client, length=length)
        return asyncio.create_task(queue.admit(turn, places.pick, 5.0))

    head = wait(1.0, 100, for_long)
    tasks = [wait(2.0, 50, for_long), wait(3.0, 10, for_short), wait(4.0, 10, for_short)]
    await turns_of_the_loop()
    assert [task.done() for task in tasks] == [False, True, False], "there is one place for short ones"
    other = wait(0.0, 1, for_short, client="d")
    await turns_of_the_loop()
    for_short.free = 1
    queue.wake()
    await turns_of_the_loop()
    assert (tasks[2].done(), other.done()) == (False, True), "whoever passes uses up its client's turn"
    for_long.free = 1
    queue.wake()
    await turns_of_the_loop()
    assert (head.done(), tasks[0].done()) == (True, False)
    await end([*tasks, other])


async def test_full_queue_refuses_the_next_one_but_not_a_known_one():
    queue, places = AdmissionQueue(1), Places(0)
    first = admit(queue, places)
    await turns_of_the_loop()
    with pytest.raises(QueueFull):
        await admit(queue, places)
    retry = admit(queue, places, known=True)
    await turns_of_the_loop()
    assert len(queue) == 2
    await end([first, retry])
    assert len(queue) == 0


async def test_retry_goes_before_all_who_were_not_let_in_yet():
    queue, places = AdmissionQueue(10), Places(0)
    first = admit(queue, places, rank=1.0)
    await turns_of_the_loop()
    retry = admit(queue, places, rank=9.0, known=True)
    await turns_of_the_loop()
    places.free = 1
    queue.wake()
    await turns_of_the_loop()
    assert (retry.done(), first.done()) == (True, False)
    await end([first])


async def test_waiting_ends_with_a_timeout_and_frees_its_place_in_line():
    queue, places = AdmissionQueue(1), Places(0)
    with pytest.raises(TimeoutError):
        await admit(queue, places, timeout_s=0.01)
    assert len(queue) == 0


async def test_whose_time_is_up_gets_no_place_even_if_its_timer_is_late():
    clock = Clock()
    queue, places = AdmissionQueue(10, clock), Places(0)
    late = admit(queue, places, rank=1.0, timeout_s=5.0)
    in_time = admit(queue, places, rank=2.0, timeout_s=50.0)
    await turns_of_the_loop()
    clock.now += 6.0
    places.free = 1
    queue.wake()
    await turns_of_the_loop()
    assert isinstance(late.exception(), TimeoutError)
    assert (in_time.done(), places.free) == (True, 0)


async def test_place_given_in_the_very_turn_of_a_cancellation_is_not_lost():
    queue, places = AdmissionQueue(1), Places(0)
    task = admit(queue, places)
    await turns_of_the_loop()
    places.free = 1
    queue.wake()
    assert places.free == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert places.free == 1


async def test_error_while_picking_reaches_its_own_request_only():
    queue, places = AdmissionQueue(10), Places(0)

    def broken() -> None:
        raise RuntimeError("no")

    second = admit(queue, places, rank=2.0)
    await turns_of_the_loop()
    with pytest.raises(RuntimeError, match="no"):
        await queue.admit(Turn(1.0), broken, 5.0)
    places.free = 1
    queue.wake()
    await second


# --- fairness --------------------------------------------------------------------------------------------------------


async def test_one_request_is_next_however_many_another_client_has_queued():
    order = await served([*[Ask("busy", 100.0)] * 500, Ask("quiet", 100.0, rank=1e9, at=5)], 8)
    assert order.index(Ask("quiet", 100.0, rank=1e9, at=5)) <= 6, "it waits for one place that is given before its turn"


async def test_client_alone_gets_every_place():
    assert len(await served([Ask("alone", 50.0)] * 40, 40)) == 40


async def test_client_that_comes_back_is_not_paid_for_its_absence():
    asks = [*[Ask("steady")] * 100, *[Ask("back", at=0)] * 2, *[Ask("back", at=50)] * 40]
    order = await served(asks, 80)
    counts = Counter(ask.client for ask in order[50:])
    assert counts["steady"] >= 14, "half of the places since then, not none for as long as the other one was away"


async def test_asking_for_one_at_a_time_gets_no_more_than_queueing_all():
    queue, places, counts = AdmissionQueue(1000), Places(0), Counter[str]()

    async def ask(client: str, times: int) -> None:
        for _ in range(times):
            await queue.admit(Turn(0.0, client, 10.0), places.pick, 60.0)
            counts[client] += 1

    tasks = [asyncio.create_task(ask("queued", 1)) for _ in range(100)]
    tasks += [asyncio.create_task(ask("single", 100)), asyncio.create_task(ask("third", 100))]
    for _ in range(90):
        await turns_of_the_loop()
        places.free = 1
        queue.wake()
    await turns_of_the_loop()
    assert max(counts.values()) - min(counts.values()) <= 1, counts
    await end(tasks)


async def test_what_a_client_got_while_nobody_else_asked_is_not_held_against_it():
    queue, places = AdmissionQueue(1000), Places(50)
    for _ in range(50):
        await queue.admit(Turn(0.0, "early", 10.0), places.pick, 60.0)
    order: list[str] = []

    async def ask(client: str) -> None:
        await queue.admit(Turn(0.0, client, 10.0), places.pick, 60.0)
        order.append(client)

    tasks = [asyncio.create_task(ask(client)) for client in ("late", "early") for _ in range(10)]
    for _ in range(10):
        await turns_of_the_loop()
        places.free = 1
        queue.wake()
    await turns_of_the_loop()
    assert Counter(order) == {"late": 5, "early": 5}
    await end(tasks)


async def test_requests_of_one_client_are_served_by_priority_and_arrival():
    asks = [Ask("c", rank=rank) for rank in (5.0, 3.0, -10.0, 4.0)]
    order = await served([*asks, *[Ask("d")] * 4], 8)
    assert [ask.rank for ask in order if ask.client == "c"] == [-10.0, 3.0, 4.0, 5.0]


@settings(max_examples=40, deadline=None)
@given(
    clients=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200)), min_size=2, max_size=6),
    rounds=st.integers(5, 60),
)
def test_clients_that_all_wait_get_equal_shares_of_cost(clients: list[tuple[int, int]], rounds: int):
    """Start-time fair queueing: as long as both wait, two clients' work differs by at most one request of each."""
    asks = [Ask(str(number), float(cost)) for number, (count, cost) in enumerate(clients) for _ in range(count)]
    order = asyncio.run(served(asks, rounds))
    done = Counter[str]()
    left = Counter(ask.client for ask in asks)
    ended = set[str]()
    for ask in order:
        done[ask.client] += int(ask.cost)
        left[ask.client] -= 1
        for a in left:
            for b in left:
                if a not in ended and b not in ended:
                    most = clients[int(a)][1] + clients[int(b)][1]
                    assert abs(done[a] - done[b]) <= most, f"{a} and {b} after {done}"
        ended |= {client for client, count in left.items() if count == 0}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30))
def test_ageing_lets_no_request_starve(seed: int):
    """A low-priority request of a client is served although better ones keep coming, once it has aged enough."""
    rng = random.Random(seed)
    step, handicap = 10.0, rng.randrange(1, 5)
    patient = Ask("c", rank=0.0 + handicap * step)
    asks = [patient, *(Ask("c", rank=float(second), at=second) for second in range(80))]
    order = asyncio.run(served(asks, 80))
    assert patient in order[: int(handicap * step) + 3]


# --- the bound -------------------------------------------------------------------------------------------------------


async def test_full_queue_takes_the_last_place_from_whoever_has_most():
    queue, places = AdmissionQueue(10), Places(0)
    flood = [asyncio.create_task(queue.admit(Turn(float(i), "flood"), places.pick, 5.0)) for i in range(10)]
    await turns_of_the_loop()
    quiet = asyncio.create_task(queue.admit(Turn(99.0, "quiet"), places.pick, 5.0))
    await turns_of_the_loop()
    assert isinstance(flood[9].exception(), QueueFull), "its last one goes"
    assert not quiet.done()
    with pytest.raises(QueueFull):
        await queue.admit(Turn(0.0, "flood"), places.pick, 5.0)
    assert len(queue) == 10
    await end([*flood, quiet])


# --- estimates -------------------------------------------------------------------------------------------------------


async def test_wait_is_estimated_from_what_was_let_in_of_late():
    clock = Clock()
    queue, places = AdmissionQueue(100, clock), Places(0)
    assert queue.wait_s(Turn(0.0, "a", 10.0)) == 0.0, "nobody waits"
    tasks = [asyncio.create_task(queue.admit(Turn(float(i), "a", 10.0), places.pick, 1e6)) for i in range(60)]
    await turns_of_the_loop()
    for _ in range(40):
        clock.now += 2.0
        places.free = 1
        queue.wake()
        await turns_of_the_loop()
    assert queue.wait_s(Turn(100.0, "a", 10.0)) == pytest.approx(20 * 2.0, rel=0.1), "20 before it, 2 s each"
    assert queue.wait_s(Turn(100.0, "b", 10.0)) == pytest.approx(2.0, rel=0.1), "another client waits for one of them"
    assert queue.wait_s(Turn(-1.0, "a", 10.0)) == 0.0, "the first in line"
    clock.now += 1000.0
    assert queue.wait_s(Turn(100.0, "a", 10.0)) > 1000.0, "nothing has moved for long: who knows whether it will"
    await end(tasks)


async def test_wait_is_unknown_until_something_was_let_in():
    queue = AdmissionQueue(10)
    task = admit(queue, Places(0))
    await turns_of_the_loop()
    assert queue.wait_s(Turn(0.0)) is None
    await end([task])


# --- many ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_clients", [1, 2000])
async def test_mass_of_waiters_comes_and_goes_in_linear_work(num_clients: int):
    """Not a benchmark: an algorithm that is quadratic in 2,000 waiters would need some minutes for this."""
    queue, places = AdmissionQueue(5000), Places(0)
    started = time.process_time()
    tasks = [
        asyncio.create_task(queue.admit(Turn(float(i), f"c{i % num_clients}"), places.pick, 60.0)) for i in range(2000)
    ]
    await turns_of_the_loop()
    assert len(queue) == 2000
    for _ in range(1000):  # what heartbeats do
        queue.wake()
    for task in tasks[:1000]:
        task.cancel()
    await turns_of_the_loop()
    assert len(queue) == 1000
    assert places.asked < 6000
    places.free = 1000
    queue.wake()
    await asyncio.gather(*tasks[1000:])
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (len(queue), places.free) == (0, 0)
    assert time.process_time() - started < 20.0
