"""Continuous batching over a paged pool: rank, admission, growth, preemption. No tensors, no sockets, no own clock.

Every step takes every RUNNING sequence, plus at most one bounded chunk of the best-ranked COMPUTING one. Growth that
does not fit first revokes the youngest incomplete reservation, then preempts the lowest rank. The best-ranked holder
of blocks is never a victim, so something always progresses; and a request that could never fit alone is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from ..engine.block_pool import BlockPool, BlockTable
from ..engine.request import finish_reason
from ..transfer.errors import OutOfBlocks
from ..transfer.messages import Finish, Reserve
from .preemption import PreemptionMode, SwapIn, SwapOut, SwapSpace
from .sequence import Key, Sequence, State, Work

PRIORITY_STEP_S = 10.0  # one priority level weighs as much as this much waiting: ageing without a sweep
HOLDING = (State.RECEIVING, State.COMPUTING, State.RUNNING)


@dataclass(frozen=True)
class DecodeLimits:
    """`vocab_size`: token ids at or above it are refused.
    `local_tokens`: in local_prefill "auto", prompts missing at most this many tokens are computed here."""

    max_sequences: int = 64
    max_model_len: int = 1 << 30
    vocab_size: int = 1 << 31
    local_tokens: int = 32
    transfer_deadline_s: float = 30.0
    let_go_deadline_s: float = 3.0  # between slabs that prefill has handed to the link
    preemption: PreemptionMode = "auto"


@dataclass
class Plan:
    """What one turn decided. To be carried out in this order, before anything else is written to the cache."""

    swapped_out: list[SwapOut] = field(default_factory=list)
    swapped_in: list[SwapIn] = field(default_factory=list)
    revoked: list[Sequence] = field(default_factory=list)  # reservations that had to make room
    moved: list[Sequence] = field(default_factory=list)  # preempted, and to come back through the prefill pool
    recomputed: list[Sequence] = field(default_factory=list)  # preempted, and to be computed here again
    admitted: list[Sequence] = field(default_factory=list)
    batch: list[Work] = field(default_factory=list)

    @property
    def preempted(self) -> list[Sequence]:
        return [order.sequence for order in self.swapped_out] + self.moved + self.recomputed


class Scheduler:
    """All sequences of one decode worker. `root_of(cache_salt)` gives the start of a sequence's hash chain."""

    def __init__(
        self,
        pool: BlockPool,
        limits: DecodeLimits,
        root_of: Callable[[str], bytes],
        eos_token_ids: frozenset[int],
        swap: SwapSpace | None = None,
    ) -> None:
        self._pool = pool
        self.swap = swap or SwapSpace(0)
        self._limits = limits
        self._root_of = root_of
        self._eos_token_ids = eos_token_ids
        self._jobs: dict[Key, list[Sequence]] = {}
        self._arrivals = 0
        self._reservations = 0

    # --- what there is ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for job in self._jobs.values() for sequence in job)

    @property
    def keys(self) -> set[Key]:
        return set(self._jobs)

    def in_state(self, *states: State) -> list[Sequence]:
        """Sequences in any of the states, best rank first."""
        return sorted((s for s in self if s.state in states), key=lambda s: s.rank)

    def find(self, key: Key) -> list[Sequence]:
        return list(self._jobs.get(key, ()))

    def receiving(self, key: Key) -> Sequence | None:
        """The sequence of this attempt that waits for slabs, if there is one."""
        return next((s for s in self._jobs.get(key, ()) if s.state is State.RECEIVING), None)

    @property
    def queued_tokens(self) -> int:
        """Still to be computed here, of prompts that nobody else computes."""
        waiting = [s for s in self if s.state is State.WAITING and s.local_prefill == "always"]
        return sum(s.num_missing for s in (*waiting, *self.in_state(State.COMPUTING)))

    def streaming_s(self, now: float) -> float:
        """For how long the oldest stream has been flowing, preempted ones among them; 0 if there is none."""
        return max((now - s.streaming_since for s in self if s.streaming_since), default=0.0)

    # --- arrival and end -------------------------------------------------------------------------------------

    def refusal(self, message: Reserve) -> tuple[str, str] | None:
        """Why this request can never run here, as (reason, detail); None if it can."""
        longest = len(message.prompt) + message.params.max_tokens
        if longest > self._limits.max_model_len:
            return "too_long", f"{longest} tokens are more than max_model_len {self._limits.max_model_len}"
        if self._pool.blocks_for(longest) > self._pool.num_blocks:
            pool_tokens = self._pool.num_blocks * self._pool.block_size
            return "too_long", f"{longest} tokens are more than the pool's {pool_tokens}"
        if len(message.outputs) != len(message.finished):
            return "malformed", "outputs and finished differ in length"
        if all(message.finished) or max(map(len, message.outputs)) > message.params.max_tokens:
            return "malformed", "no choice is unfinished, or one has more output than max_tokens"
        if max(max(tokens, default=0) for tokens in (message.prompt, *message.outputs)) >= self._limits.vocab_size:
            return "malformed", f"a token id is not below {self._limits.vocab_size}"
        return None

    def add(self, message: Reserve, now: float) -> None:
        """Take a request in. One sequence for all choices at first; one each when they already have tokens."""
        rank = now - message.age_s + message.priority * PRIORITY_STEP_S
        root = self._root_of(message.cache_salt)
        fresh = not any(message.outputs) and not any(message.finished)
        remote = bool(message.prefill) and (fresh or message.finished.count(False) == 1)
        job: list[Sequence] = []
        for choice, (output, finished) in enumerate(zip(message.outputs, message.finished, strict=True)):
            if finished or (fresh and choice > 0):
                continue
            self._arrivals += 1
            job.append(
                Sequence(
                    message.request, message.attempt, choice, message.prompt, list(output), message.params,
                    (rank, self._arrivals, choice), BlockTable(self._pool, root), message.prefill if remote else "",
                    message.local_prefill if remote or fresh else "always", message.local_reason,
                    len(message.outputs) if fresh else 1,
                )
            )  # fmt: skip
        if job:
            self._jobs[message.request, message.attempt] = job

    def drop(self, key: Key, choice: int | None = None) -> list[Sequence]:
        """End an attempt, or one choice of it, in whatever state it is. Returns what was ended."""
        ended = []
        for sequence in self.find(key):
            if sequence.num_choices > 1 and choice is not None:  # not split yet: remember it until then
                sequence.unwanted.add(choice)
                gone = len(sequence.unwanted) == sequence.num_choices
            else:
                gone = choice is None or sequence.choice == choice
            if gone:
                self._end(sequence)
                ended.append(sequence)
        return ended

    def _end(self, sequence: Sequence) -> None:
        sequence.state = State.FINISHED
        sequence.table.release()
        self.swap.forget(sequence)
        job = self._jobs[sequence.key]
        job.remove(sequence)
        if not job:
            del self._jobs[sequence.key]

    def expired(self, now: float) -> list[Sequence]:
        """Reservations whose deadline has passed without progress."""
        return [s for s in self if s.state is State.RECEIVING and now > s.deadline]

    def progress(self, sequence: Sequence, now: float) -> None:
        """A slab came, or prefill said it is still at it."""
        sequence.begun = True
        self._rearm(sequence, now)

    def _rearm(self, sequence: Sequence, now: float) -> None:
        sequence.deadline = now + self._limits.transfer_deadline_s

    def listed(self, prefill: str, live: Collection[Key], now: float) -> None:
        """A prefill worker says what it is at. What it has let go of is here by now, or nearly so, or was lost."""
        for sequence in self.in_state(State.RECEIVING):
            if sequence.prefill != prefill:
                continue
            if sequence.key in live:
                self.progress(sequence, now)
            elif sequence.begun:
                sequence.deadline = min(sequence.deadline, now + self._limits.let_go_deadline_s)

    # --- one turn --------------------------------------------------------------------------------------------

    def plan(self, now: float, chunk_tokens: Callable[[int], int]) -> Plan:
        """Decide one step. `chunk_tokens(running)`: the most tokens of a prompt beside so many RUNNING sequences."""
        plan = Plan()
        for sequence in self.in_state(State.RUNNING):
            if sequence.state is State.RUNNING:  # it may have fallen victim to a better-ranked one
                self._grow(sequence, plan)
        self._admit(now, plan)
        running = self.in_state(State.RUNNING)
        plan.batch = [Work(s, s.table.num_computed, 1) for s in running]
        if computing := self.in_state(State.COMPUTING):
            first = computing[0]
            count = min(first.num_missing, chunk_tokens(len(running)))
            plan.batch.append(Work(first, first.table.num_computed, count))
        return plan

    def _grow(self, sequence: Sequence, plan: Plan) -> None:
        """Room for the KV of the newest token, or the sequence is preempted itself."""
        needed = sequence.table.num_missing_blocks(len(sequence.tokens))
        while needed > self._pool.num_available:
            victim = self._victim()
            if victim is None:
                raise AssertionError("the best-ranked sequence does not fit an otherwise empty pool")
            self.evict(victim, plan)
            if victim is sequence:
                return
        sequence.table.grow(len(sequence.tokens))

    def _victim(self) -> Sequence | None:
        holders = self.in_state(*HOLDING)[1:]
        reserved = [s for s in holders if s.state is State.RECEIVING]
        return reserved[-1] if reserved else holders[-1] if holders else None

    def evict(self, victim: Sequence, plan: Plan) -> None:
        """Take the victim's blocks, and decide how it will come back."""
        num_tokens = victim.table.num_computed
        if victim.state is State.RECEIVING:
            plan.revoked.append(victim)
            self._end(victim)
            return
        if self._limits.preemption != "recompute" and self.swap.reserve(victim, num_tokens):
            plan.swapped_out.append(SwapOut(victim, victim.table.blocks, num_tokens))
        elif self._limits.preemption == "auto" and self._can_move(victim):
            plan.moved.append(victim)
            self._end(victim)
            return
        else:
            plan.recomputed.append(victim)
        victim.table.release()
        victim.state = State.WAITING

    def _can_move(self, sequence: Sequence) -> bool:
        """May the gateway have it recomputed by prefill? Only if that is all there is of its request."""
        return bool(sequence.prefill) and sequence.num_choices == 1 and len(self._jobs[sequence.key]) == 1

    def admit(self, now: float) -> Plan:
        """In the middle of a step: give blocks to those that wait, up to the first that has to be copied back."""
        plan = Plan()
        self._admit(now, plan, swapping=False)
        return plan

    def _admit(self, now: float, plan: Plan, *, swapping: bool = True) -> None:
        """Give blocks to the head of the WAITING queue while they fit. One spare block per holder stays free."""
        waiting = self.in_state(State.WAITING)
        holders = len(self.in_state(*HOLDING))
        for sequence in waiting:
            if holders >= self._limits.max_sequences or (sequence in self.swap and not swapping):
                return
            if not sequence.scoring:  # cached tokens have no logits
                sequence.table.match_prefix(sequence.tokens)
            if sequence.table.num_missing_blocks(len(sequence.tokens)) + holders > self._pool.num_available:
                sequence.table.release()
                return
            sequence.table.grow(len(sequence.tokens))
            if sequence in self.swap:
                self._bring_back(sequence, plan)
            else:
                self._place(sequence, now)
                plan.admitted.append(sequence)
            holders += 1

    def _bring_back(self, sequence: Sequence, plan: Plan) -> None:
        """From host memory into its new blocks, as far as the prefix cache has not kept them."""
        held, saved = sequence.table.num_computed, self.swap.reserved(sequence)
        plan.swapped_in.append(SwapIn(sequence, min(held, saved), saved))
        sequence.table.commit(sequence.tokens, max(held, saved))
        sequence.state = State.RUNNING if sequence.num_missing == 1 else State.COMPUTING

    def _place(self, sequence: Sequence, now: float) -> None:
        """Who computes what is missing: prefill (RECEIVING) or this worker (COMPUTING)."""
        local, reason = False, ""
        if sequence.announced or sequence.local_prefill == "always":
            local, reason = True, sequence.local_reason or "resumed"
        elif sequence.local_prefill == "auto" and sequence.num_missing <= self._limits.local_tokens:
            local, reason = True, "short"
        sequence.local_reason = reason
        sequence.state = State.COMPUTING if local else State.RECEIVING
        if not local:
            self._reservations += 1
            sequence.reservation = self._reservations
            self._rearm(sequence, now)

    # --- what a step or a handoff brought ------------------------------------------------------------------------

    def computed(self, work: Work) -> None:
        """The KV of a piece of work is in its blocks."""
        sequence = work.sequence
        sequence.table.commit(sequence.tokens, work.start + work.count)

    def scored(self, work: Work, count: int) -> None:
        """So many log probabilities of prompt tokens behind the work's first one have been sent."""
        if count:
            work.sequence.scored = max(work.sequence.scored, work.start + count)

    def received(self, sequence: Sequence) -> None:
        """All slabs are in its blocks; what prefill had to say of the prompt's tokens it has said."""
        sequence.scored = len(sequence.prompt) - 1
        sequence.table.commit(sequence.tokens, len(sequence.tokens))

    def split(self, sequence: Sequence) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """The prompt's KV is complete: one sequence per choice, sharing its blocks.

        Returns those still wanted, and the (source, target) blocks to copy. A choice whose partial block
        does not fit, or for whom no row of a step is left, goes to WAITING and comes back like a preempted one.
        """
        family, copies = [sequence], []
        room = self._limits.max_sequences - len(self.in_state(*HOLDING))
        for choice in range(1, sequence.num_choices):
            table, copy = sequence.table.sibling(), None
            if room > 0 and choice not in sequence.unwanted:
                with suppress(OutOfBlocks):
                    table, copy = sequence.table.fork()
                    room -= 1
            twin = Sequence(
                sequence.request, sequence.attempt, choice, sequence.prompt, list(sequence.output), sequence.params,
                (*sequence.rank[:2], choice), table, prefill=sequence.prefill, announced=True, scored=sequence.scored,
            )  # fmt: skip
            twin.state = State.RUNNING if table.blocks else State.WAITING
            self._jobs[sequence.key].append(twin)
            family.append(twin)
            if copy is not None:
                copies.append(copy)
        sequence.num_choices = 1
        sequence.state = State.RUNNING
        for unwanted in [s for s in family if s.choice in sequence.unwanted]:
            family.remove(unwanted)
            self._end(unwanted)
        return family, copies

    def append(self, sequence: Sequence, token: int) -> Finish:
        """A new token; the sequence ends here if it is its last. Returns the finish reason, "" while it goes on."""
        sequence.append(token)
        finish = finish_reason(sequence.params, sequence.output, self._eos_token_ids)
        if finish:
            self._end(sequence)
        return finish

    def check_invariants(self) -> None:
        """Assert what must hold between two turns (flag --check-invariants)."""
        self._pool.check_invariants(s.table.blocks for s in self)
        for sequence in self:
            assert (sequence.state in HOLDING) == bool(sequence.table.blocks), f"{sequence.key} {sequence.state}"
            assert sequence.table.num_computed <= len(sequence.tokens)
            assert sequence not in self.swap or sequence.state is State.WAITING, f"{sequence.key} is here and swapped"
            if sequence.state is State.RECEIVING:
                assert min(sequence.deadline, sequence.reservation) > 0, "a reservation without a deadline"
            if sequence.state is State.RUNNING:
                assert sequence.num_missing == 1, f"{sequence.key} runs with {sequence.num_missing} tokens missing"
