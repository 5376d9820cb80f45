"""A worker as the gateway knows it, what is placed on it, and what it may say about that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..transfer.messages import Busy, Failed, Finish, FirstTokens, Gone, Link, Register, Reserved, WorkerHeartbeat
from .router import PrefixIndex

# Attempts placed on a worker for each that it says it can have. Decode ranks and admits by itself, so it gets more than
# it can run; prefill would turn them away.
PLACES = {"decode": 2, "prefill": 1}


@dataclass(frozen=True)
class NewToken:
    """One item of a `Tokens` message."""

    choice: int
    index: int
    token: int
    finish: Finish


@dataclass(frozen=True)
class Lost:
    """The worker cannot go on with this attempt. `died`: it crashed, hung or was cut off, rather than left.

    `planned`: nothing is wrong, the attempt shall move (the worker drains): not counted against the request.
    `alone`: nobody else had anything there when it died.
    """

    reason: str
    died: bool
    planned: bool = False
    alone: bool = False


Answer = Reserved | Busy | FirstTokens | Failed | Gone
Event = Answer | NewToken | Lost


class Owner(Protocol):
    """Who placed a leg; `deliver` must only take note."""

    def deliver(self, worker: str, attempt: int, event: Event) -> None: ...


@dataclass(eq=False)
class Leg:
    """An attempt's presence at one worker. `pending_tokens`: prompt tokens that wait for it to do its part."""

    owner: Owner
    request: str
    attempt: int
    pending_tokens: int
    sent_at_seq: int | None = None  # the newest GatewayHeartbeat when its first message went out
    must_be_listed: bool = True  # does it being absent from the worker's list mean that it is lost?
    unlisted: int = 0


@dataclass(eq=False)
class Worker:
    identity: str  # of its connection
    register: Register
    last_heard: float
    registered_at: float
    heartbeat: WorkerHeartbeat | None = None
    seq: int = 0
    legs: dict[str, Leg] = field(default_factory=dict)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    busy_until: float = 0.0

    @property
    def id(self) -> str:
        return self.register.worker

    @property
    def name(self) -> str:
        return self.id.partition("#")[0]

    @property
    def ready(self) -> bool:
        return self.heartbeat is not None and self.heartbeat.ready

    @property
    def has_place(self) -> bool:
        return len(self.legs) < self.register.max_sequences * PLACES[self.register.role]

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence whose KV its pool can hold."""
        return self.register.num_blocks * self.register.block_size

    def pending_tokens(self) -> int:
        return sum(leg.pending_tokens for leg in self.legs.values())

    def links(self) -> list[Link]:
        return self.heartbeat.links if self.heartbeat else []

    def is_linked_to(self, decode: Worker) -> bool:
        return any(link.worker == decode.id and link.state == "linked" for link in self.links())
