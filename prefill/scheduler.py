"""Chunked prefill: which tokens of which prompts run next. No tensors, no sockets, no clock of its own.

Shortest remaining first. With ageing, so that a long prompt is not passed for ever: once its rank is the best it gets
every fourth token at least, and shorter ones what they want of the rest; for under an overload all have waited for
long, and who wants little should still not wait for all of that. A prompt whose next block is being computed right now
for somebody else waits for that block instead of computing it twice. Prompts whose decode worker is not taking its
slabs in are passed over until it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..engine.block_pool import BlockPool, BlockTable
from ..engine.order import length_tokens, rank_tokens, step_tokens
from ..transfer.messages import Prefill
from ..transfer.sender import Outgoing
from .prompt import Key, Prompt, State, Work

OLDEST_SHARE = 0.25  # of all tokens, for the prompt with the best rank while shorter ones pass it


@dataclass(frozen=True)
class PrefillLimits:
    chunk_tokens: int = 256
    max_waiting: int = 64
    max_computing: int = 16


class Scheduler:
    """All prompts of one prefill worker. `root_of(cache_salt)` gives the start of a prompt's hash chain."""

    def __init__(self, pool: BlockPool, limits: PrefillLimits, root_of: Callable[[str], bytes]) -> None:
        self._pool = pool
        self._limits = limits
        self._root_of = root_of
        self._prompts: dict[Key, Prompt] = {}
        self._leaving: list[Prompt] = []  # needed no more, but a device still copies out of their blocks
        self._owed = 0.0  # tokens that the prompt with the best rank is behind its share

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts.values())

    @property
    def keys(self) -> set[Key]:
        return set(self._prompts)

    def get(self, key: Key) -> Prompt | None:
        return self._prompts.get(key)

    def in_state(self, state: State) -> list[Prompt]:
        return [p for p in self if p.state is state]

    def refusal(self, message: Prefill) -> str:
        """Why this prompt cannot be taken now; empty if it can."""
        num_tokens = len(message.prompt) + len(message.output)
        if self._pool.blocks_for(num_tokens) > self._pool.num_blocks:
            return f"{num_tokens} tokens are more than the pool's {self._pool.num_blocks} blocks"
        if len(self.in_state(State.WAITING)) >= self._limits.max_waiting:
            return f"{self._limits.max_waiting} prompts are waiting already"
        return ""

    def add(self, message: Prefill, outgoing: Outgoing, now: float) -> None:
        table = BlockTable(self._pool, self._root_of(message.cache_salt))
        prompt = Prompt(message, table, outgoing, now)
        self._prompts[prompt.key] = prompt

    def drop(self, key: Key) -> Prompt | None:
        """End an attempt in whatever state it is."""
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            prompt.state = State.FINISHED
            self._let_go(prompt)
        return prompt

    def _let_go(self, prompt: Prompt) -> None:
        """Its blocks can be computed anew as soon as nothing is copied out of them: also those of a dropped attempt,
        which decode may have been handed already."""
        if prompt.outgoing.link.copied_out:
            prompt.table.release()
        elif prompt not in self._leaving:
            self._leaving.append(prompt)

    @property
    def is_copying(self) -> bool:
        return bool(self._leaving)

    # --- one turn --------------------------------------------------------------------------------------------

    def plan(self, now: float, tokens_per_s: float | None) -> list[Work]:
        """The chunks of the next step, by the measured speed. Where a prompt ends, more than half of what may be
        computed is enough: the rest would only delay its first token."""
        budget = step_tokens(self._limits.chunk_tokens, tokens_per_s)
        leaving, self._leaving = self._leaving, []
        for prompt in leaving:
            self._let_go(prompt)
        candidates = [
            p for p in self if p.state in (State.WAITING, State.COMPUTING) and p.outgoing.link.has_room
        ]
        oldest = min(candidates, key=_rank, default=None)
        shortest = min(candidates, key=_length, default=None)
        first = oldest if self._owed > 0 else None
        candidates.sort(key=lambda p: (p is not first, _length(p)))
        batch = self._chunks(candidates, budget, now)
        if oldest is not shortest:
            more = sum(work.count * (OLDEST_SHARE - (work.prompt is oldest)) for work in batch)
            self._owed = min(max(self._owed + more, -float(budget)), float(budget))
        else:
            self._owed = 0.0
        return batch

    def _chunks(self, candidates: list[Prompt], budget: int, now: float) -> list[Work]:
        """As much of the candidates, in their order, as the budget allows."""
        enough, left = budget // 2, budget
        computing = len(self.in_state(State.COMPUTING))
        batch: list[Work] = []
        for prompt in candidates:
            if left == 0 or (left < enough and any(work.samples for work in batch)):
                break
            if prompt.state is State.WAITING:
                if computing >= self._limits.max_computing or not self._start(prompt, now):
                    continue
                computing += 1
            count = min(left, prompt.num_missing)
            batch.append(Work(prompt, prompt.table.num_computed, count))
            left -= count
        return batch

    def _start(self, prompt: Prompt, now: float) -> bool:
        """Give a waiting prompt its blocks, unless they do not fit or its next block is on its way elsewhere."""
        scoring = prompt.message.params.prompt_logprobs is not None  # cached tokens have no logits
        held = 0 if scoring else prompt.table.match_prefix(prompt.tokens)
        needed = prompt.table.num_missing_blocks(len(prompt.tokens))
        if self._being_computed(prompt.table.key_after(held)) or needed > self._pool.num_available:
            prompt.table.release()
            return False
        prompt.table.grow(len(prompt.tokens))
        prompt.num_cached = held
        prompt.started_at = now
        prompt.state = State.COMPUTING
        return True

    def _being_computed(self, key: bytes | None) -> bool:
        """Is the full block with this key among the ones some active prompt still has to finish?"""
        if key is None:
            return False
        for other in self.in_state(State.COMPUTING):
            done = other.table.num_computed // self._pool.block_size
            if other.outgoing.link.has_room and key in other.table.keys[done:]:
                return True
        return False

    # --- what a step brought -------------------------------------------------------------------------------------

    def computed(self, work: Work) -> None:
        """The KV of a piece of work is in its blocks."""
        work.prompt.table.commit(work.prompt.tokens, work.end)

    def all_sent(self, prompt: Prompt) -> None:
        """Every slab is on its way and the handoff is behind them: the blocks can go."""
        prompt.state = State.SENDING
        self._let_go(prompt)

    def check_invariants(self) -> None:
        """Assert what must hold between two turns (flag --check-invariants)."""
        self._pool.check_invariants(p.table.blocks for p in {*self, *self._leaving})
        for prompt in self:
            holds = prompt.state is State.COMPUTING or prompt in self._leaving
            assert holds == bool(prompt.table.blocks), f"{prompt.key} {prompt.state}"


def _length(prompt: Prompt) -> float:
    """What is missing of it: all of it while it waits, its cache hits are not known yet."""
    return length_tokens(prompt.num_missing, prompt.message.priority)


def _rank(prompt: Prompt) -> float:
    return rank_tokens(prompt.num_missing, prompt.arrived_at, prompt.message.priority)
