from __future__ import annotations

import asyncio

import pytest

from pdserve.gateway.limits import AdmissionQueue, QueueFull


class Places:
    """A number of places to take."""

    def __init__(self, free: int) -> None:
        self.free = free

    def pick(self) -> Place | None:
        if self.free == 0:
            return None
        self.free -= 1
        return Place(self)


class Place:
    def __init__(self, places: Places) -> None:
        self._places = places

    def release(self) -> None:
        self._places.free += 1


def admit(queue: AdmissionQueue, places: Places, rank: float = 0.0, timeout_s: float = 5.0, known: bool = False):
    return asyncio.create_task(queue.admit(rank, places.pick, timeout_s, known=known))


async def test_free_place_is_given_at_once():
    places = Places(1)
    await admit(AdmissionQueue(0), places)
    assert places.free == 0


async def test_places_are_given_in_rank_order_not_in_order_of_arrival():
    queue, places, order = AdmissionQueue(10), Places(0), []

    async def wait(name: str, rank: float) -> None:
        await queue.admit(rank, places.pick, 5.0, known=False)
        order.append(name)

    tasks = [asyncio.create_task(wait(name, rank)) for name, rank in (("late", 3.0), ("early", 1.0), ("middle", 2.0))]
    await asyncio.sleep(0)
    for _ in tasks:
        places.free += 1
        queue.wake()
        await asyncio.sleep(0.01)
    assert order == ["early", "middle", "late"]


async def test_nobody_passes_a_head_that_finds_no_place():
    queue = AdmissionQueue(10)
    head = asyncio.create_task(queue.admit(1.0, Places(0).pick, 5.0, known=False))
    await asyncio.sleep(0)
    other = Places(1)
    second = asyncio.create_task(queue.admit(2.0, other.pick, 5.0, known=False))
    await asyncio.sleep(0.01)
    assert not second.done()
    assert other.free == 1
    head.cancel()
    await asyncio.sleep(0.01)
    assert second.done(), "the place is free for the next one once the head has gone"


async def test_full_queue_refuses_the_next_one_but_not_a_known_one():
    queue, places = AdmissionQueue(1), Places(0)
    first = admit(queue, places)
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await admit(queue, places)
    retry = admit(queue, places, known=True)
    await asyncio.sleep(0)
    assert len(queue) == 2
    for task in (first, retry):
        task.cancel()
    await asyncio.gather(first, retry, return_exceptions=True)
    assert len(queue) == 0


async def test_waiting_ends_with_a_timeout_and_frees_its_place_in_line():
    queue, places = AdmissionQueue(1), Places(0)
    with pytest.raises(TimeoutError):
        await admit(queue, places, timeout_s=0.01)
    assert len(queue) == 0


async def test_place_given_in_the_very_turn_of_a_cancellation_is_not_lost():
    queue, places = AdmissionQueue(1), Places(0)
    task = admit(queue, places)
    await asyncio.sleep(0.01)
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
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="no"):
        await queue.admit(1.0, broken, 5.0, known=False)
    places.free = 1
    queue.wake()
    await second
