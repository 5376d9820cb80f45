"""From a request in the queue to a place for it: one leg at a decode worker and, usually, one at a prefill worker."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..transfer.messages import LocalPrefill
from .limits import AdmissionQueue
from .pool import Pool
from .router import Ask, LocalPrefillMode, Policy, local_prefill, prefix_chain
from .worker import Leg, Owner, Worker

PRIORITY_STEP_S = 10.0  # one priority level weighs as much as this much waiting, as in decode's rank


class NoWorkers(Exception):
    """No set of workers that could serve is registered and ready."""


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
    local_reason: str

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

    `spread`: several choices have gone their own ways, so decode recomputes them and nobody prefills.
    `suspect`: a worker died with it; if that was its fault, nobody else should go down with it again, so an idle
    decode worker is preferred.
    """

    owner: Owner
    request: str
    attempt: int
    num_tokens: int
    chain: Sequence[bytes]
    spread: bool
    suspect: bool = False


class Dispatcher:
    """Asks the router for a pair of workers, in the queue's order, and claims places there."""

    def __init__(
        self,
        pool: Pool,
        queue: AdmissionQueue,
        policy: Policy,
        local_prefill_mode: LocalPrefillMode,
        queue_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.queue = queue
        self.queue_timeout_s = queue_timeout_s
        self.clock = clock
        self._policy = policy
        self._mode: LocalPrefillMode = local_prefill_mode
        self._turn = itertools.count()
        self._incarnation = secrets.token_hex(4)
        self._requests = itertools.count(1)
        pool.on_change = queue.wake

    def new_request_id(self) -> str:
        return f"{self._incarnation}-{next(self._requests)}"

    def chain(self, prompt: Sequence[int], cache_salt: str) -> list[bytes]:
        return prefix_chain(prompt, cache_salt)

    @property
    def can_serve(self) -> bool:
        return bool(self.pool.pairs(alone=self._mode == "auto"))

    async def place(self, wanted: Wanted, rank: float, timeout_s: float) -> Placement:
        """Wait in the queue for a place. Raises QueueFull, NoWorkers (first attempts only) or TimeoutError."""
        known = wanted.attempt > 1
        return await self.queue.admit(rank, lambda: self._claim(wanted), max(timeout_s, 0.0), known=known)

    def _candidates(self, wanted: Wanted) -> list[tuple[Worker, Worker | None]]:
        """Pairs that could serve the attempt if they had room."""
        if wanted.spread:
            return self.pool.decode_alone()
        pairs = self.pool.pairs(alone=self._mode == "auto")
        if not pairs and wanted.attempt == 1:
            raise NoWorkers
        fitting = [(d, p) for d, p in pairs if p is None or p.capacity_tokens >= wanted.num_tokens]
        if fitting or not pairs:
            return fitting
        if self._mode == "never":
            raise PromptTooLong(f"{wanted.num_tokens} tokens do not fit the KV pool of any prefill worker")
        return self.pool.decode_alone()

    def _claim(self, wanted: Wanted) -> Placement | None:
        """A place for the attempt right now, or None."""
        pairs = self._candidates(wanted)
        by_name = {
            (d.id, p.id if p else ""): (d, p)
            for d, p in pairs
            if d.has_place and (p is None or (p.has_place and self.pool.is_free(p)))
        }
        if not by_name:
            return None
        if wanted.suspect and any(not d.legs for d, _ in by_name.values()):
            by_name = {names: pair for names, pair in by_name.items() if not pair[0].legs}
        loads = [self.pool.load(d, p) for d, p in by_name.values()]
        workers = {w.id: w for pair in by_name.values() for w in pair if w is not None}
        overlap = {name: worker.prefixes.overlap_tokens(wanted.chain) for name, worker in workers.items()}
        chosen = self._policy(loads, Ask(wanted.num_tokens, next(self._turn), overlap))
        decode, prefill = by_name[chosen.decode.worker, chosen.prefill.worker if chosen.prefill else ""]
        how, why = local_prefill(chosen, self._mode)
        if wanted.spread:
            how, why = "always", "resumed"
        missing = wanted.num_tokens - min(overlap[decode.id], wanted.num_tokens)
        decode_leg = Leg(wanted.owner, wanted.request, wanted.attempt, missing)
        self.pool.place(decode, decode_leg)
        prefill_leg = None
        if prefill is not None:
            to_compute = wanted.num_tokens - min(overlap[prefill.id], wanted.num_tokens)
            prefill_leg = Leg(wanted.owner, wanted.request, wanted.attempt, to_compute)
            self.pool.place(prefill, prefill_leg)
        return Placement(self.pool, decode, decode_leg, prefill, prefill_leg, how, why)
