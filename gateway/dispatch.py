"""From a request in the queue to a place for it: one leg at a decode worker and, usually, one at a prefill worker."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..engine.order import length_tokens, rank_tokens
from ..transfer.messages import LocalPrefill, Reserved
from .elastic import Choice, Where, choose, forced
from .limits import AdmissionQueue, Turn
from .pool import Pool
from .router import Ask, LocalPrefillMode, Policy, prefix_chain
from .serving import Pairs, decode_alone, is_starting, pairs
from .worker import Leg, Owner, Worker, at_decode, at_prefill, pair_load

BACKLOG_S = 0.25  # of prompts that may stand at a worker, beside the one it computes and the one after that
BACKLOG_PROMPTS = 2
OUTPUT_WINDOW = 64.0  # finished requests that the expected output length remembers
MAX_RETRY_AFTER_S = 60.0


class NoWorkers(Exception):
    """No set of workers that could serve the model is registered and ready, or will be in a moment."""


class Overloaded(Exception):
    """The request would get its first token too late. `retry_after_s`: when it might not any more."""

    def __init__(self, wait_s: float, slo_s: float) -> None:
        super().__init__(f"its first token would take {wait_s:.1f} s, more than the {slo_s:g} s allowed")
        self.retry_after_s = wait_s - slo_s


class PromptTooLong(Exception):
    """No prefill worker's pool can ever hold the prompt, and decode may not compute it itself."""


@dataclass(eq=False)
class Placement:
    """Where one attempt runs. Whoever got it releases it."""

    pool: Pool
    decode: Worker
    decode_leg: Leg
    prefill: Worker | None
    prefill_leg: Leg | None
    local_prefill: LocalPrefill
    choice: Choice
    placed_at: float

    def release(self) -> None:
        """Tell both workers to drop the attempt, as far as they have heard of it, and give the places back."""
        self.drop_prefill(cancel=True)
        self.pool.remove(self.decode, self.decode_leg, cancel=True)

    def finished(self) -> None:
        """Decode has ended the attempt itself: give the places back."""
        self.drop_prefill(cancel=False)
        self.pool.remove(self.decode, self.decode_leg, cancel=False)

    def drop_prefill(self, *, cancel: bool) -> None:
        """Prefill has no part in the attempt (any more)."""
        if self.prefill is not None and self.prefill_leg is not None:
            self.pool.remove(self.prefill, self.prefill_leg, cancel=cancel)
            self.prefill = self.prefill_leg = None


@dataclass(frozen=True)
class Wanted:
    """What the dispatcher must know of an attempt.

    `num_tokens`: its input, of all choices. `max_tokens`: the most that one choice can come to.
    `spread`: several choices have gone their own ways, so decode recomputes them and nobody prefills.
    `suspect`: a worker died with it; if that was its fault, nobody else should go down with it again, so an idle
    decode worker is preferred.
    `output_tokens`: the most it may still generate, over all choices. `first_seen`: on the dispatcher's clock.
    """

    owner: Owner
    request: str
    attempt: int
    num_tokens: int
    max_tokens: int
    chain: Sequence[bytes]
    spread: bool
    suspect: bool = False
    client: str = ""
    output_tokens: int = 0
    first_seen: float = 0.0
    priority: int = 0


@dataclass(frozen=True)
class Objectives:
    """What no request shall exceed; None: no limit. With them, requests that would miss them are refused early, and
    workers get no more at once than they can serve in time, so that overload costs only the excess."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class ChoiceCounts(Protocol):
    """Takes note of who computes prompts, and of how long that took against what had been predicted."""

    def count_choice(self, where: Where, reason: str) -> None: ...

    def observe_prediction(self, where: Where, predicted_s: float, observed_s: float) -> None: ...


class NotCounted:
    """ChoiceCounts of somebody who does not want to know."""

    def count_choice(self, where: Where, reason: str) -> None:
        pass

    def observe_prediction(self, where: Where, predicted_s: float, observed_s: float) -> None:
        pass


NOT_COUNTED = NotCounted()


class Dispatcher:
    """Asks the router for a pair of workers of one model, in the queue's order, and claims places there.

    Each model has one, with a queue of its own: its workers can do nothing for another model's requests, so nobody
    waits behind those, and a request that is tried again stays with its model.
    """

    def __init__(
        self,
        pool: Pool,
        model: str,
        queue: AdmissionQueue,
        policy: Policy,
        local_prefill_mode: LocalPrefillMode,
        queue_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        objectives: Objectives = Objectives(),
        counts: ChoiceCounts = NOT_COUNTED,
    ) -> None:
        self.pool = pool
        self.model = model
        self.queue = queue
        self.queue_timeout_s = queue_timeout_s
        self.clock = clock
        self._objectives = objectives
        self._output_tokens = 0.0  # mean of finished requests; 0 while there was none
        self._policy = policy
        self._mode: LocalPrefillMode = local_prefill_mode
        self._counts = counts
        self._turn = 0  # how many attempts have been placed
        self._incarnation = secrets.token_hex(4)
        self._requests = itertools.count(1)
        pool.on_change.append(queue.wake)

    def new_request_id(self) -> str:
        return f"{self._incarnation}-{next(self._requests)}"

    def chain(self, prompt: Sequence[int], cache_salt: str) -> list[bytes]:
        return prefix_chain(prompt, cache_salt)

    @property
    def _alone(self) -> bool:
        """May decode workers serve where no prefill worker can?"""
        return self._mode == "auto"

    @property
    def can_serve(self) -> bool:
        return bool(pairs(self.pool.of(self.model), alone=self._alone))

    async def place(self, wanted: Wanted, timeout_s: float) -> Placement:
        """Wait in the queue for a place. Raises QueueFull or TimeoutError; of first attempts also Overloaded and
        NoWorkers."""
        turn = self._turn_of(wanted)
        slo_s = self._objectives.ttft_s
        if slo_s is None or turn.known:
            return await self.queue.admit(turn, lambda: self._claim(wanted), max(timeout_s, 0.0))
        age_s = self.clock() - wanted.first_seen
        if (wait_s := self.queue.wait_s(turn)) is not None and age_s + wait_s > slo_s:
            raise Overloaded(age_s + wait_s, slo_s)
        try:
            return await self.queue.admit(turn, lambda: self._claim(wanted), max(min(timeout_s, slo_s - age_s), 0.0))
        except TimeoutError:
            if timeout_s < slo_s:
                raise
            raise Overloaded(slo_s + self.retry_after_s(wanted), slo_s) from None

    def retry_after_s(self, wanted: Wanted) -> float:
        """When it might be worth while to ask again: when those who wait now will have been served."""
        wait_s = self.queue.wait_s(self._turn_of(wanted))
        return MAX_RETRY_AFTER_S if wait_s is None else min(wait_s, MAX_RETRY_AFTER_S)

    def note_output(self, num_tokens: float) -> None:
        """A request has generated so many tokens, over all choices."""
        kept = 1 - 1 / OUTPUT_WINDOW if self._output_tokens else 0.0
        self._output_tokens = self._output_tokens * kept + num_tokens * (1 - kept)

    def _turn_of(self, wanted: Wanted) -> Turn:
        """Its cost is what it makes workers compute: the prompt as far as nobody has it cached, and the output, of
        which `max_tokens` says little and requests of late say more."""
        if wanted.attempt > 1:
            return Turn(rank_tokens(0, wanted.first_seen, wanted.priority), wanted.client, 0.0, known=True)
        workers = self.pool.of(self.model)
        cached = max((worker.prefixes.overlap_tokens(wanted.chain) for worker in workers), default=0)
        output = min(wanted.output_tokens, self._output_tokens or wanted.output_tokens)
        missing = max(wanted.num_tokens - cached, 0)
        rank = rank_tokens(missing, wanted.first_seen, wanted.priority)
        length = length_tokens(missing, wanted.priority)
        return Turn(rank, wanted.client, missing + max(output, 1.0), length=length)

    def _candidates(self, wanted: Wanted) -> Pairs:
        """Pairs that could serve the attempt if they had room; no pair where it is worth while to wait for one. Raises
        NoWorkers, or PromptTooLong."""
        workers = self.pool.of(self.model)
        found = decode_alone(workers) if wanted.spread else pairs(workers, alone=self._alone)
        # If none can ever hold it, one of them says so: with its own numbers.
        found = [(d, p) for d, p in found if d.capacity_tokens >= wanted.max_tokens] or found
        if wanted.spread:
            return found
        if not found and wanted.attempt == 1 and not is_starting(workers, alone=self._alone, now=self.clock()):
            raise NoWorkers
        fitting = [(d, p) for d, p in found if p is None or p.capacity_tokens >= wanted.num_tokens]
        if fitting or not found:
            return fitting
        if self._mode == "never":
            raise PromptTooLong(f"{wanted.num_tokens} tokens do not fit the KV pool of any prefill worker")
        return decode_alone(workers)

    def _claim(self, wanted: Wanted) -> Placement | None:
        """A place for the attempt right now, or None."""
        found = [(d, p) for d, p in self._candidates(wanted) if self._takes_one_more(d)]
        if wanted.suspect and any(not d.legs for d, _ in found):
            found = [(d, p) for d, p in found if not d.legs]
        workers = {w.id: w for pair in found for w in pair if w is not None}
        missing = {
            name: wanted.num_tokens - min(worker.prefixes.overlap_tokens(wanted.chain), wanted.num_tokens)
            for name, worker in workers.items()
        }
        can = {name for name, worker in workers.items() if self._may_compute(worker, missing[name])}
        open_pairs = [(d, p) for d, p in found if (p or d).id in can]
        if not found or (not open_pairs and found[0][1] is None):
            return None
        decode, prefill = self._best(open_pairs or found, wanted, missing)
        helpers = {d.id: d for d, _ in found if d.id in can}
        choice = self._choose(wanted, decode, prefill, helpers, missing)
        if choice.where == "prefill" and not open_pairs:
            return None  # it is worth while to wait for it
        if choice.where == "decode":
            decode, prefill = workers[choice.worker], None
        computing = prefill or decode
        self._check_in_time(wanted, computing, missing[computing.id])
        self._turn += 1
        decode_leg = Leg(
            wanted.owner, wanted.request, wanted.attempt, missing[decode.id], wanted.num_tokens, wanted.max_tokens
        )
        self.pool.place(decode, decode_leg)
        prefill_leg = None
        if prefill is not None:
            prefill_leg = Leg(wanted.owner, wanted.request, wanted.attempt, missing[prefill.id])
            self.pool.place(prefill, prefill_leg)
        (prefill_leg or decode_leg).computes = max(missing[computing.id], 1)
        how: LocalPrefill = "always" if prefill is None else self._mode
        return Placement(self.pool, decode, decode_leg, prefill, prefill_leg, how, choice, self.clock())

    def _best(
        self, found: Pairs, wanted: Wanted, missing: Mapping[str, int]
    ) -> tuple[Worker, Worker | None]:
        """The pair that the policy takes."""
        by_name = {(d.id, p.id if p else ""): (d, p) for d, p in found}
        overlap = {name: wanted.num_tokens - tokens for name, tokens in missing.items()}
        loads = [pair_load(d, p) for d, p in found]
        chosen = self._policy(loads, Ask(wanted.num_tokens, self._turn, overlap))
        return by_name[chosen.decode.worker, chosen.prefill.worker if chosen.prefill else ""]

    def _choose(
        self,
        wanted: Wanted,
        decode: Worker,
        prefill: Worker | None,
        helpers: Mapping[str, Worker],
        missing: Mapping[str, int],
    ) -> Choice:
        """Who computes the prompt: the prefill worker, one of the `helpers`, or `decode` where there is nobody else."""
        if prefill is None:
            here = at_decode(decode, missing[decode.id])
            return forced("resumed" if wanted.spread else "no_prefill", here)
        there = at_prefill(prefill, decode, missing[prefill.id])
        if self._mode == "never":
            return choose(there, None, wanted.first_seen)
        return choose(there, [at_decode(d, missing[name]) for name, d in helpers.items()], wanted.first_seen)

    def _takes_one_more(self, decode: Worker) -> bool:
        """May one more request go to this decode worker now, whoever computes its prompt? More than it can be busy
        with stay in the queue, where they can still go anywhere, in fair order, and cost nothing to give up."""
        if not decode.has_place:
            return False
        tpot_s = self._objectives.tpot_s
        return tpot_s is None or not decode.legs or decode.pace.step_s(len(decode.legs) + 1) <= tpot_s

    def _may_compute(self, worker: Worker, missing_tokens: int) -> bool:
        """May one more prompt be sent to this worker of either kind now, for it to compute so many tokens of it?"""
        if worker.register.role == "prefill" and not (worker.has_place and self.pool.is_free(worker)):
            return False
        return _backlog_is_short(worker, missing_tokens)

    # --- what became of it -------------------------------------------------------------------------------------------

    def reserved(self, place: Placement, event: Reserved) -> Choice:
        """Decode has a place for it; who computes its prompt is certain now."""
        if event.local and place.prefill is not None:  # less is missing than was thought
            place.choice = Choice("decode", event.reason)
        place.decode.pace.answered(self.clock() - place.placed_at)
        self._counts.count_choice(place.choice.where, place.choice.reason)
        return place.choice

    def first_token(self, place: Placement) -> None:
        """The attempt has a token; if it is the first one, was it as early as predicted?"""
        choice = place.choice
        if choice.ttft_s is not None:
            place.choice = replace(choice, ttft_s=None)
            self._counts.observe_prediction(choice.where, choice.ttft_s, self.clock() - place.placed_at)

    def _check_in_time(self, wanted: Wanted, computing: Worker, missing_tokens: int) -> None:
        """Raise Overloaded when the first token would come too late from this worker: no work is spent then.

        An idle worker gets whatever comes fresh: its speed may have changed, and would never be measured anew."""
        slo_s = self._objectives.ttft_s
        speed, queued_tokens = computing.pace.tokens_per_s, sum(computing.ahead_of(missing_tokens))
        if slo_s is None or wanted.attempt > 1 or not speed:
            return
        left_s = (queued_tokens + missing_tokens) / speed
        if not queued_tokens:
            left_s = min(left_s, slo_s / 2)
        if (wait_s := self.clock() - wanted.first_seen + left_s) > slo_s:
            raise Overloaded(wait_s, slo_s)


def _backlog_is_short(worker: Worker, missing_tokens: int) -> bool:
    """Enough to never be idle until word of that comes here, and no more. Longer prompts do not count where they would
    wait for this one: it need not wait here for them."""
    ahead = worker.ahead_of(missing_tokens)
    return len(ahead) < BACKLOG_PROMPTS or sum(ahead) < BACKLOG_S * (worker.pace.tokens_per_s or 0.0)
