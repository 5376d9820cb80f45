"""The gateway's queue: the only long one in the system, where a waiting request holds nothing.

Between clients it is fair, by start-time fair queueing: each client has a clock that its admitted requests push on by
their cost; the client whose clock is furthest behind is next, and one that comes (back) starts at the present. So a
client alone gets everything, n busy clients get a n-th each in tokens, and one request of a quiet client is next,
however many a busy one has queued. Within a client, rank decides (shortest first with ageing, moved by priority).
Requests that were let in before (retries) go ahead of all: their client is in the middle of an answer.

When the queue is full, the client with most waiting loses its last one, be that the newcomer or not.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ..engine.rate import Rate


class QueueFull(Exception):
    """As many requests wait already as may wait."""


class Releasable(Protocol):
    """A place that was given to a request and must be given back."""

    def release(self) -> None: ...


P = TypeVar("P", bound=Releasable)


@dataclass(frozen=True)
class Turn:
    """A request's standing in line. `rank`: lower goes first within its client. `cost`: in tokens of work.

    `known`: it was let in before, and may always wait again. `length`: tokens of its prompt, moved by its priority."""

    rank: float
    client: str = ""
    cost: float = 1.0
    known: bool = False
    length: float = 0.0


@dataclass(eq=False)
class _Waiter:
    turn: Turn
    tie: int
    deadline: float
    pick: Callable[[], Releasable | None]
    future: asyncio.Future[Any]
    left: bool = False

    def __lt__(self, other: _Waiter) -> bool:
        return (self.turn.rank, self.tie) < (other.turn.rank, other.tie)


@dataclass(eq=False)
class _Client:
    """Those of one client that wait. Who leaves early stays in `heap` until it comes up, or half of it is such."""

    name: str
    clock: float  # tokens served, in the queue's virtual time
    heap: list[_Waiter] = field(default_factory=list)
    by_length: list[tuple[float, int, _Waiter]] = field(default_factory=list)  # the same as a heap of another order
    waiting: int = 0
    cost: float = 0.0

    def push(self, waiter: _Waiter) -> None:
        heapq.heappush(self.heap, waiter)
        heapq.heappush(self.by_length, (waiter.turn.length, waiter.tie, waiter))
        self.waiting += 1
        self.cost += waiter.turn.cost

    def leave(self, waiter: _Waiter) -> None:
        waiter.left = True
        self.waiting -= 1
        self.cost = self.cost - waiter.turn.cost if self.waiting else 0.0
        if 2 * self.waiting < len(self.heap):
            self.heap = [w for w in self.heap if not w.left]
            heapq.heapify(self.heap)
            self.by_length = [entry for entry in self.by_length if not entry[2].left]
            heapq.heapify(self.by_length)

    def head(self) -> _Waiter | None:
        while self.heap and self.heap[0].left:
            heapq.heappop(self.heap)
        return self.heap[0] if self.heap else None

    def candidates(self) -> list[_Waiter]:
        """Who may be served next: the head, or if there is no place for it, the one with the shortest prompt."""
        if (head := self.head()) is None:
            return []
        while self.by_length[0][2].left:
            heapq.heappop(self.by_length)
        shortest = self.by_length[0][2]
        return [head, shortest] if shortest.turn.length < head.turn.length else [head]

    def last(self) -> _Waiter:
        return max(w for w in self.heap if not w.left)

    def cost_ahead(self, rank: float) -> float:
        return sum(w.turn.cost for w in self.heap if w.turn.rank <= rank and not w.left)


class AdmissionQueue:
    """Requests in order, each with a function that takes a place for it or finds none.

    When there is no place for the head, the others wait too; except for the shortest prompt of the same client, which
    the workers may have a place for before they are through with long ones. It does not take the head's: that is asked
    first, every time.
    """

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting = max_waiting
        self._clock = clock
        self._ties = itertools.count()
        self._waiting = 0
        self._retries = _Client("", float("-inf"))
        self._clients: dict[str, _Client] = {}
        self._order: list[tuple[float, int, _Client]] = []  # heap of all in `_clients`, by their clocks
        self._present = 0.0  # virtual time: where the clock of whoever was next last stood
        self._rate = Rate()
        self._counted_at: float | None = None  # until when busy time is in the rate; None while nobody waits

    def __len__(self) -> int:
        return self._waiting

    async def admit(self, turn: Turn, pick: Callable[[], P | None], timeout_s: float) -> P:
        """Wait in line until `pick` returns a place, and return it; it is the caller's to release.

        Raises QueueFull, TimeoutError, or whatever `pick` raises.
        """
        if self._waiting >= self._max_waiting and not turn.known:
            if not self._waiting and (free := pick()) is not None:
                return free
            self._make_room(turn.client)
        deadline = self._clock() + timeout_s
        future: asyncio.Future[P] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(turn, next(self._ties), deadline, pick, future)
        client = self._retries if turn.known else self._client(turn.client)
        client.push(waiter)
        self._waiting += 1
        if self._counted_at is None:
            self._counted_at = self._clock()
        if waiter in client.candidates():
            self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except BaseException:  # cancelled or out of time, maybe in the very turn in which the place was given
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()
            future.cancel()
            if not waiter.left:
                was_head = self._next() is client and client.head() is waiter
                self._leave(client, waiter)
                if was_head:
                    self.wake()
            raise

    def wake(self) -> None:
        """Something changed: give places to whoever is next, as long as there are any."""
        while (client := self._next()) is not None:
            if not any(self._advance(client, waiter) for waiter in client.candidates()):
                return

    def _advance(self, client: _Client, waiter: _Waiter) -> bool:
        """Let the waiter out of the line, with a place or without. False while there is no place."""
        if waiter.future.done():  # cancelled in this turn, it has not run yet
            self._leave(client, waiter)
        elif self._clock() >= waiter.deadline:  # its timer is late: no work may be spent on it any more
            waiter.future.set_exception(TimeoutError())
            self._leave(client, waiter)
        else:
            return self._serve(client, waiter)
        return True

    def _serve(self, client: _Client, waiter: _Waiter) -> bool:
        """Give the waiter a place, or its error. False when there is no place."""
        try:
            place = waiter.pick()
        except Exception as error:
            waiter.future.set_exception(error)  # its own coroutine raises it
            self._leave(client, waiter)
            return True
        if place is None:
            return False
        self._count(waiter.turn.cost)
        if client is not self._retries:
            self._present = max(self._present, client.clock)
            client.clock += waiter.turn.cost
            heapq.heapreplace(self._order, (client.clock, next(self._ties), client))
        self._leave(client, waiter)
        waiter.future.set_result(place)
        return True

    def _next(self) -> _Client | None:
        """Whose turn it is. One that waits for nothing is forgotten when its turn comes, not before: else it could
        get more by asking for one thing at a time."""
        if self._retries.head() is not None:
            return self._retries
        while self._order:
            client = self._order[0][2]
            if client.head() is not None:
                return client
            heapq.heappop(self._order)
            del self._clients[client.name]
            self._present = max(self._present, client.clock)
        return None

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(name, self._present)
            heapq.heappush(self._order, (client.clock, next(self._ties), client))
        return client

    def _leave(self, client: _Client, waiter: _Waiter) -> None:
        client.leave(waiter)
        self._waiting -= 1
        if not self._waiting:
            self._count(0.0)
            self._counted_at = None

    def _make_room(self, newcomer: str) -> None:
        """Refuse the last one of the client with most waiting; raises QueueFull when that is the newcomer."""
        full = QueueFull(f"{self._max_waiting} requests are waiting already")
        own = self._clients[newcomer].waiting if newcomer in self._clients else 0
        longest = max(self._clients.values(), key=lambda client: client.waiting, default=None)
        if longest is None or longest.waiting <= own + 1:
            raise full
        loser = longest.last()
        if not loser.future.done():
            loser.future.set_exception(full)
        self._leave(longest, loser)

    # --- how long it takes -------------------------------------------------------------------------------------------

    def _count(self, cost: float) -> None:
        now = self._clock()
        if self._counted_at is not None:
            self._rate.add(cost, now - self._counted_at)
            self._counted_at = now

    def wait_s(self, turn: Turn) -> float | None:
        """How long a request of this standing would wait, going by what was let in of late; None if that is unknown.

        While it waits, every other client is served no more than its own is.
        """
        if not self._waiting:
            return 0.0
        self._count(0.0)
        rate = self._rate.per_s
        if rate is None:
            return None
        mine = self._clients.get(turn.client)
        share = turn.cost + (mine.cost_ahead(turn.rank) if mine is not None else 0.0)
        others = sum(min(client.cost, share) for client in self._clients.values() if client is not mine)
        return (share - turn.cost + others) / rate if rate > 0 else float("inf")
