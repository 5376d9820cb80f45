"""The gateway's queue: the only long one in the system, where a waiting request holds nothing."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar


class QueueFull(Exception):
    """As many requests wait already as may wait."""


class Releasable(Protocol):
    """A place that was given to a request and must be given back."""

    def release(self) -> None: ...


P = TypeVar("P", bound=Releasable)


@dataclass(order=True)
class _Waiter:
    rank: float  # when it was first seen, moved by its priority: lower goes first
    tie: int
    pick: Callable[[], Releasable | None] = field(compare=False)
    future: asyncio.Future[Any] = field(compare=False)


class AdmissionQueue:
    """Requests in rank order, each with a function that takes a place for it or finds none.

    Nobody passes the head: when there is no place for it, the others wait too.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiters: list[_Waiter] = []
        self._ties = itertools.count()

    def __len__(self) -> int:
        return len(self._waiters)

    async def admit(
        self, rank: float, pick: Callable[[], P | None], timeout_s: float, *, known: bool
    ) -> P:
        """Wait in line until `pick` returns a place, and return it; it is the caller's to release.

        `known` requests (a retry) were let in before and may always wait again. Raises QueueFull, TimeoutError, or
        whatever `pick` raises.
        """
        if len(self) >= self._max_waiting and not known:
            if self._waiters or (free := pick()) is None:
                raise QueueFull(f"{self._max_waiting} requests are waiting already")
            return free
        waiter = _Waiter(rank, next(self._ties), pick, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiters, waiter)
        self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                place: P = await waiter.future
        except BaseException:  # cancelled or out of time, maybe in the very turn in which the place was given
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().release()
            waiter.future.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                heapq.heapify(self._waiters)
            self.wake()
            raise
        return place

    def wake(self) -> None:
        """Something changed: give places to whoever is at the head, as long as there are any."""
        while self._waiters:
            head = self._waiters[0]
            if not head.future.done():  # else it was cancelled in this turn and has not run yet
                try:
                    place = head.pick()
                except Exception as error:
                    head.future.set_exception(error)  # its own coroutine raises it
                else:
                    if place is None:
                        return
                    head.future.set_result(place)
            heapq.heappop(self._waiters)
