"""A worker as the gateway knows it, what is placed on it, and what it may say about that."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from ..transfer.messages import (
    Busy,
    Failed,
    Finish,
    FirstTokens,
    Gone,
    PromptLogprobs,
    Register,
    Reserved,
    TokenLogprobs,
    WorkerHeartbeat,
)
from ..transfer.reports import Link, Speed
from .elastic import AtDecode, AtPrefill
from .pace import Pace
from .router import DecodeLoad, Pair, PrefillLoad, PrefixIndex

# Decode gets a few more than it can run, so that it need not ask for the next one; whoever waits should do so here,
# where it can still go elsewhere, in fair order. Prefill would turn them away.
DECODE_AHEAD = 1 / 8


@dataclass(frozen=True)
class NewToken:
    """One item of a `Tokens` message."""

    choice: int
    index: int
    token: int
    finish: Finish
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Lost:
    """The worker cannot go on with this attempt. `died`: it crashed, hung or was cut off, rather than left.

    `planned`: nothing is wrong, the attempt shall move (the worker drains, or has never heard of it): not counted
    against the request.
    `alone`: nobody else had anything there when it died.
    """

    reason: str
    died: bool
    planned: bool = False
    alone: bool = False


Answer = Reserved | Busy | PromptLogprobs | FirstTokens | Failed | Gone
Event = Answer | NewToken | Lost


class Owner(Protocol):
    """Who placed a leg; `deliver` must only take note."""

    def deliver(self, worker: str, attempt: int, event: Event) -> None: ...


@dataclass(eq=False)
class Leg:
    """An attempt's presence at one worker.

    `pending_tokens`: prompt tokens that wait for it to do its part. `num_tokens`: prompt and output when the attempt
    began; `max_tokens`: the most that one choice of it can come to.
    """

    owner: Owner
    request: str
    attempt: int
    pending_tokens: int
    num_tokens: int = 0
    max_tokens: int = 0
    sent_at_seq: int | None = None  # the newest GatewayHeartbeat when its first message went out
    must_be_listed: bool = True  # does it being absent from the worker's list mean that it is lost?
    unlisted: int = 0
    sent_at: float = 0.0
    computes: int = 0  # tokens this worker has to compute before the request's first token; 0 when it has
    streaming_since: float | None = None  # when its first token came from here
    moving: bool = False  # its owner was told to take it elsewhere, since the worker drains


@dataclass(eq=False)
class Worker:
    identity: str  # of its connection
    register: Register
    last_heard: float
    registered_at: float
    heartbeat: WorkerHeartbeat | None = None
    heartbeat_at: float = 0.0
    seq: int = 0
    legs: dict[str, Leg] = field(default_factory=dict)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    busy_until: float = 0.0
    pace: Pace = field(default_factory=Pace)
    dismissed: bool = False  # it was sent Drain: nothing more is placed on it
    told_at: float = 0.0  # when it was sent Peers or Drain last
    unlinked: set[str] = field(default_factory=set)  # decode workers it had no link to after all, since its last word
    cut_off_at: float | None = None  # since when its connection is gone, while it may still come back

    @property
    def id(self) -> str:
        return self.register.worker

    @property
    def name(self) -> str:
        return self.id.partition("#")[0]

    @property
    def model(self) -> str:
        return self.register.model

    @property
    def ready(self) -> bool:
        return self.heartbeat is not None and self.heartbeat.ready

    @property
    def draining(self) -> bool:
        return self.dismissed or (self.heartbeat is not None and self.heartbeat.draining)

    @property
    def takes_work(self) -> bool:
        return self.ready and not self.draining

    @property
    def state(self) -> str:
        """As people are told."""
        return "draining" if self.draining else "ready" if self.ready else "starting"

    @property
    def has_place(self) -> bool:
        most = self.register.max_sequences
        return len(self.legs) < (most + math.ceil(most * DECODE_AHEAD) if self.register.role == "decode" else most)

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence whose KV its pool can hold."""
        return self.register.num_blocks * self.register.block_size

    def pending_tokens(self) -> int:
        return sum(leg.pending_tokens for leg in self.legs.values())

    def ahead_of(self, missing_tokens: int) -> list[int]:
        """What it has to compute of our prompts, each, before one of which it lacks so much: prefill takes the shortest
        first, decode what came first."""
        waiting = [leg.computes for leg in self.legs.values() if leg.computes]
        return [n for n in waiting if n <= missing_tokens] if self.register.role == "prefill" else waiting

    def queued_tokens(self) -> int:
        """Of prompts, still to be computed there: what it said, and what it cannot have known of then."""
        if self.heartbeat is None:
            return sum(leg.computes for leg in self.legs.values())
        listed = set(self.heartbeat.live)
        unheard = (leg.computes for leg in self.legs.values() if (leg.request, leg.attempt) not in listed)
        return self.heartbeat.queued_tokens + sum(unheard)

    def queued_before(self, missing_tokens: int) -> int:
        """The same without what would wait for a prompt of which it lacks so much."""
        after = sum(leg.computes for leg in self.legs.values()) - sum(self.ahead_of(missing_tokens))
        return max(self.queued_tokens() - after, 0)

    def streams_since(self) -> float | None:
        """When the oldest stream on it began: of ours, or of another gateway's by its last word."""
        began = [leg.streaming_since for leg in self.legs.values() if leg.streaming_since is not None]
        if self.heartbeat is not None and self.heartbeat.speed.streaming_s:
            began.append(self.heartbeat_at - self.heartbeat.speed.streaming_s)
        return min(began, default=None)

    def longest_stream(self) -> int:
        """Tokens that the longest of our streams on it began with."""
        return max((leg.num_tokens for leg in self.legs.values() if leg.streaming_since is not None), default=0)

    @property
    def speed(self) -> Speed:
        return self.heartbeat.speed if self.heartbeat is not None else Speed()

    def computed(self, leg: Leg, now: float) -> None:
        """A token of the request came from here, maybe its first one."""
        if leg.streaming_since is None:
            leg.streaming_since = now
        if leg.computes:
            self.pace.computed(leg.computes, leg.sent_at, now)
            leg.computes = 0

    def links(self) -> list[Link]:
        return self.heartbeat.links if self.heartbeat else []

    def is_linked_to(self, decode: Worker) -> bool:
        if decode.id in self.unlinked:
            return False
        return any(link.worker == decode.id and link.state == "linked" for link in self.links())


def pair_load(decode: Worker, prefill: Worker | None) -> Pair:
    """What the router may know of a pair: the workers' last word, corrected by what was placed there since."""
    beat = decode.heartbeat
    assert beat is not None, "only ready workers are paired"
    free = beat.free_blocks * decode.register.block_size - decode.pending_tokens()
    load = DecodeLoad(decode.id, free, len(decode.legs))
    if prefill is None or prefill.heartbeat is None:
        return Pair(load, None)
    return Pair(load, PrefillLoad(prefill.id, prefill.queued_tokens(), len(prefill.legs)))


def at_prefill(worker: Worker, decode: Worker, missing_tokens: int) -> AtPrefill:
    return AtPrefill(missing_tokens, worker.queued_before(missing_tokens), worker.speed, decode.pace.answer_s)


def at_decode(worker: Worker, missing_tokens: int) -> AtDecode:
    return AtDecode(
        worker.id, missing_tokens, worker.queued_tokens(), worker.speed, worker.streams_since(),
        worker.longest_stream(), at_rest=not worker.legs,
    )  # fmt: skip
