"""One request's way through the pools: its state, its attempts, and which of its tokens count.

    QUEUED      in the gateway's queue; holds nothing
    RESERVING   decode was asked for blocks
    PREFILLING  prefill computes the prompt, KV is on its way to decode
    DECODING    decode has the KV (or computes the prompt itself) and sends tokens
    FINISHED    every choice has its finish reason; or FAILED, or CANCELLED

A worker that is busy, fails, leaves or dies ends the attempt: both legs are cancelled, and the request is QUEUED again
with a higher attempt number and the tokens accepted so far as its input. Only here does `state` change.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from ..engine.lifetime import Event as LifetimeEvent
from ..engine.lifetime import Lifetime
from ..transfer.messages import (
    Busy,
    Cancel,
    Failed,
    FirstTokens,
    Prefill,
    PromptLogprobs,
    Reserve,
    Reserved,
)
from ..transfer.sampling_params import SamplingParams
from .api.errors import ApiError, bad_grammar, failed, queue_full, too_long, unavailable
from .attempt import AttemptOver, RetryKind, ending
from .choice import ChoiceState, Sink, Taken
from .dispatch import Dispatcher, NoWorkers, Overloaded, Placement, PromptTooLong, Wanted
from .elastic import Choice
from .limits import QueueFull
from .prompt_scores import PromptScores
from .worker import Event, NewToken

log = logging.getLogger(__name__)

MAX_RETRIES = 3
POISON_DEATHS = 2


class State(Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RetryCounter(Protocol):
    def count_retry(self, kind: RetryKind) -> None: ...


@dataclass(frozen=True)
class Job:
    """What is asked for: nothing else than this and the tokens accepted so far is a request's state."""

    prompt: list[int]
    num_choices: int
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    first_choice: int = 0  # number of its choice 0 among all choices of the HTTP request
    client: str = ""  # whose it is, for fairness
    grammar_field: str = ""  # of the HTTP request, where its grammar came from


class Request:
    """Runs one prompt to its end with `await request.run()`; whatever happens, nothing of it stays at a worker."""

    def __init__(
        self,
        job: Job,
        dispatcher: Dispatcher,
        sink: Sink,
        lifetime: Lifetime,
        retries: RetryCounter,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.id = dispatcher.new_request_id()
        self.job = job
        self.model = dispatcher.model
        self.state = State.QUEUED
        self.attempt = 0
        self.choice: Choice | None = None  # who computes the prompt, in the newest attempt that is reserved
        self.cached_tokens = 0
        self.choices = [ChoiceState() for _ in range(job.num_choices)]
        scored = job.params.prompt_logprobs is not None
        self._scores = PromptScores(len(job.prompt) - 1 if scored else 0)
        self._dispatcher = dispatcher
        self._pool = dispatcher.pool
        self._sink = sink
        self._lifetime = lifetime
        self._retries = retries
        self._eos_token_ids = eos_token_ids
        self._chain = dispatcher.chain(job.prompt, job.cache_salt)
        self._first_seen = dispatcher.clock()
        self._deadline = self._first_seen + dispatcher.queue_timeout_s  # by which an attempt must hold a reservation
        self._failures = 0
        self._deaths = 0  # of workers, with this request on them
        self._inbox: deque[tuple[str, int, Event]] = deque()
        self._arrived = asyncio.Event()

    @property
    def done(self) -> bool:
        return all(choice.ended_by for choice in self.choices)

    @property
    def begun(self) -> bool:
        """Does a worker compute it?"""
        return self.state in (State.PREFILLING, State.DECODING)

    @property
    def _unfinished(self) -> list[int]:
        return [number for number, choice in enumerate(self.choices) if not choice.ended_by]

    def deliver(self, worker: str, attempt: int, event: Event) -> None:
        """From the pool: note what a worker said (or that it is gone)."""
        self._inbox.append((worker, attempt, event))
        self._arrived.set()

    # --- attempts ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Return when every choice is finished. Raises ApiError when that cannot be; cancel it to give up."""
        try:
            if self._scores.complete:
                self._on_prompt_scored()
            while not self.done:
                place = await self._wait_for_place()
                try:
                    await self._run_attempt(place)
                except AttemptOver as over:
                    self._consider_retry(over)
                finally:
                    self._end_attempt(place)
        except asyncio.CancelledError:
            self.state = State.CANCELLED
            raise
        except BaseException:
            self.state = State.FAILED
            raise
        self.state = State.FINISHED

    async def _wait_for_place(self) -> Placement:
        self.state = State.QUEUED
        self._lifetime.mark(LifetimeEvent.QUEUED)
        self.attempt += 1
        self._scores.restart()
        unfinished = self._unfinished
        num_tokens = len(self.job.prompt) + sum(len(self.choices[number].accepted) for number in unfinished)
        spread = len(unfinished) > 1 and any(choice.accepted for choice in self.choices)
        longest = len(self.job.prompt) + self.job.params.max_tokens
        wanted = Wanted(
            self, self.id, self.attempt, num_tokens, longest, self._chain, spread, self._deaths > 0, self.job.client,
            self.job.params.max_tokens * len(unfinished), self._first_seen, self.job.priority,
        )  # fmt: skip
        try:
            return await self._dispatcher.place(wanted, self._deadline - self._dispatcher.clock())
        except QueueFull as full:
            raise queue_full(str(full), self._dispatcher.retry_after_s(wanted)) from None
        except Overloaded as over:
            raise unavailable(f"Too busy: {over}.", "overloaded", over.retry_after_s) from None
        except NoWorkers:
            raise unavailable(f"No worker that could serve {self.model!r:.200} is up.", "no_worker") from None
        except PromptTooLong as error:
            raise too_long(str(error)) from None
        except TimeoutError:
            raise self._out_of_time(self._dispatcher.retry_after_s(wanted)) from None

    async def _run_attempt(self, place: Placement) -> None:
        self.state = State.RESERVING
        self._pool.dispatch(place.decode, place.decode_leg, self._reserve(place))
        while not self.done:
            while not self._inbox:
                await self._wait_for_event()
            worker, attempt, event = self._inbox.popleft()
            if attempt == self.attempt:
                self._handle(place, worker, event)

    async def _wait_for_event(self) -> None:
        """Until something arrives. Once decode holds a reservation, liveness bounds the wait: whichever worker dies,
        hangs or forgets the attempt is reported as `Lost`, and decode's own deadline covers the transfer."""
        self._arrived.clear()
        timeout_s = self._deadline - self._dispatcher.clock() if self.state is State.RESERVING else None
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            raise self._out_of_time() from None

    def _reserve(self, place: Placement) -> Reserve:
        job = self.job
        return Reserve(
            request=self.id,
            attempt=self.attempt,
            prompt=job.prompt,
            outputs=[list(choice.accepted) for choice in self.choices],
            finished=[bool(choice.ended_by) for choice in self.choices],
            params=self._params,
            prefill=place.prefill.id if place.prefill else "",
            local_prefill=place.local_prefill,
            local_reason=place.choice.reason if place.choice.where == "decode" else "",
            cache_salt=job.cache_salt,
            priority=job.priority,
            age_s=max(self._dispatcher.clock() - self._first_seen, 0.0),
        )

    @property
    def _params(self) -> SamplingParams:
        """What is asked of the workers now: a prompt that has been scored is not scored again."""
        params = self.job.params
        scored = params.prompt_logprobs is not None and self._scores.complete
        return replace(params, prompt_logprobs=None) if scored else params

    def _end_attempt(self, place: Placement) -> None:
        """Leave nothing behind: workers that may still be at it are told to stop, and the places are free again."""
        for choice in self.choices:
            choice.early.clear()
        if all(choice.ended_by == "decode" for choice in self.choices):
            self._learn(place)
            place.finished()
        else:
            place.release()

    def _learn(self, place: Placement) -> None:
        whole = self.job.prompt + self.choices[0].accepted
        place.decode.prefixes.learn(self._dispatcher.chain(whole, self.job.cache_salt))

    def _consider_retry(self, over: AttemptOver) -> None:
        """Return to try again; raise ApiError when that is pointless."""
        log.info("request %s attempt %d: %s: %s", self.id, self.attempt, over.kind, over.reason)
        if not over.retryable:
            raise failed(f"The request failed: {over.reason}.", "worker_failed")
        self._deaths += over.died
        if over.died and over.alone and self._deaths >= POISON_DEATHS:
            raise failed(
                f"The request was at {self._deaths} workers when they died, alone at the last one, and is not tried "
                f"again (last: {over.reason}).",
                "poison",
            )
        if over.counts:
            self._failures += 1
            if self._failures > MAX_RETRIES:
                raise failed(f"The request failed {self._failures} times, last: {over.reason}.", "worker_failed")
        if over.kind != "busy":
            self._deadline = self._dispatcher.clock() + self._dispatcher.queue_timeout_s
        self._retries.count_retry(over.kind)

    def _out_of_time(self, retry_after_s: float = 1.0) -> ApiError:
        text = f"No worker had room for the request within {self._dispatcher.queue_timeout_s:g} s."
        return unavailable(text, "queue_timeout", retry_after_s)

    # --- what workers say ----------------------------------------------------------------------------------------

    def _handle(self, place: Placement, worker: str, event: Event) -> None:
        from_prefill = place.prefill is not None and worker == place.prefill.id
        if not from_prefill and worker != place.decode.id:
            return  # prefill, after its part was over
        match event:
            case Reserved() if not from_prefill:
                self._on_reserved(place, event)
            case PromptLogprobs():
                self._on_prompt_logprobs(place, worker, event)
            case NewToken() if not from_prefill:
                self._on_decode_token(place, event)
            case FirstTokens() if from_prefill:
                self._on_first_tokens(place, event)
            case Busy():
                self._pool.mark_busy(worker)
                raise AttemptOver("busy", event.reason)
            case Failed(reason="no_link") if place.prefill is not None and from_prefill:
                place.prefill.unlinked.add(place.decode.id)
                raise AttemptOver("busy", event.detail)
            case Failed(reason="gone") if place.prefill_leg is not None and from_prefill:
                # Decode let go of it, and says why itself: its word is the true cause.
                place.prefill_leg.must_be_listed = False
            case Failed(reason="too_long"):
                raise too_long(event.detail)
            case Failed(reason="bad_grammar"):
                raise bad_grammar(self.job.grammar_field, event.detail)
            case _:
                raise ending(event, worker, from_prefill)

    def _on_reserved(self, place: Placement, event: Reserved) -> None:
        if self.state is not State.RESERVING:
            return  # of a further choice that is resumed
        self._lifetime.mark(LifetimeEvent.RESERVED)
        place.decode_leg.pending_tokens = 0
        place.decode.prefixes.correct(self._chain, event.held_tokens)
        self._note_cached(event.held_tokens)
        self.choice = self._dispatcher.reserved(place, event)
        if event.local:
            place.drop_prefill(cancel=False)
            self.state = State.DECODING
            return
        if place.prefill is None or place.prefill_leg is None:
            raise AttemptOver("failed", f"{place.decode.id} waits for a prefill worker, but there is none")
        self.state = State.PREFILLING
        job, unfinished = self.job, self._unfinished
        message = Prefill(
            request=self.id,
            attempt=self.attempt,
            prompt=job.prompt,
            output=list(self.choices[unfinished[0]].accepted),
            choice=unfinished[0],
            num_choices=len(unfinished),
            params=self._params,
            decode=place.decode.id,
            reservation=event.reservation,
            held_tokens=event.held_tokens,
            deadline_s=event.deadline_s,
            cache_salt=job.cache_salt,
            priority=job.priority,
        )
        self._pool.dispatch(place.prefill, place.prefill_leg, message)

    def _note_cached(self, tokens: int) -> None:
        """Only the first attempt's caches count: later ones find what this very request left there."""
        if self.attempt == 1:
            self.cached_tokens = max(self.cached_tokens, min(tokens, len(self.job.prompt)))

    def _on_first_tokens(self, place: Placement, event: FirstTokens) -> None:
        assert place.prefill is not None
        assert place.prefill_leg is not None
        if event.choice + len(event.tokens) > self.job.num_choices:
            raise AttemptOver("failed", f"{place.prefill.id} sent {len(event.tokens)} first tokens")
        self._require_scores(place.prefill.id)
        place.prefill_leg.pending_tokens = 0
        place.prefill_leg.must_be_listed = False  # it may be through with its part before decode says so
        place.prefill.prefixes.correct(self._chain, event.cached_tokens)
        place.prefill.prefixes.learn(self._chain)
        self._note_cached(event.cached_tokens)
        for number, token in enumerate(event.tokens):
            # Whether a token is the last one is decode's to say; one that may be waits for its word.
            if not self._may_finish(event.index, token):
                logprobs = event.logprobs[number] if number < len(event.logprobs) else None
                self._take(place, event.choice + number, event.index, Taken(token, "", logprobs))

    def _may_finish(self, index: int, token: int) -> bool:
        params = self.job.params
        return index + 1 >= params.max_tokens or token in self._eos_token_ids or token in params.stop_token_ids

    def _on_decode_token(self, place: Placement, event: NewToken) -> None:
        if event.choice >= len(self.choices):
            raise AttemptOver("failed", f"{place.decode.id} sent a token of choice {event.choice}")
        if place.prefill is None:
            self._require_scores(place.decode.id)
        if self._scores.complete and (self.state is not State.DECODING or place.prefill is not None):
            self._on_kv_complete(place)
        self._take(place, event.choice, event.index, Taken(event.token, event.finish, event.logprobs))

    def _on_kv_complete(self, place: Placement) -> None:
        """Decode's first token shows that the handoff got there: prefill has no part in the request any more."""
        self.state = State.DECODING
        self._lifetime.mark(LifetimeEvent.KV_COMPLETE)
        place.drop_prefill(cancel=False)
        place.decode.prefixes.learn(self._chain)
        for number, choice in enumerate(self.choices):
            if choice.ended_by == "gateway":
                self._cancel_choice(place, number)

    # --- the prompt's own tokens ---------------------------------------------------------------------------------

    def _on_prompt_logprobs(self, place: Placement, worker: str, event: PromptLogprobs) -> None:
        if self._scores.complete:
            return
        if not self._scores.take(event.first, event.entries):
            raise AttemptOver("failed", f"{worker} left out log probabilities before prompt token {event.first}")
        if not self._scores.complete:
            return
        self._on_prompt_scored()
        if any(choice.early for choice in self.choices):  # decode was faster than prefill's last message
            self._on_kv_complete(place)
        for number in range(len(self.choices)):
            self._accept_all(place, number)

    def _on_prompt_scored(self) -> None:
        """All that is to be said of the prompt is here (or nothing is): tokens may follow, if any are wanted."""
        if self.job.params.prompt_logprobs is not None:
            self._sink.prompt_logprobs(self.job.first_choice, self._scores.entries)
        if self.job.params.max_tokens == 0:
            for number, choice in enumerate(self.choices):
                choice.ended_by = "gateway"
                self._sink.late_finish(self.job.first_choice + number, "length")

    def _require_scores(self, worker: str) -> None:
        if not self._scores.complete:
            raise AttemptOver("failed", f"{worker} left out log probabilities of the prompt")

    # --- tokens --------------------------------------------------------------------------------------------------

    def _take(self, place: Placement, number: int, index: int, taken: Taken) -> None:
        """Accept the next token of a choice, keep an early one, ignore one that was accepted before."""
        token, finish = taken.token, taken.finish
        choice = self.choices[number]
        if choice.ended_by:
            return
        if taken.logprobs is None and self.job.params.logprobs is not None:
            raise AttemptOver("failed", f"token {index} came without its log probability")
        if choice.disagrees(index, token):
            raise AttemptOver("failed", f"{place.decode.id} and prefill disagree on token {index}")
        if index == len(choice.accepted) - 1 and finish:
            choice.ended_by = "decode"
            self._sink.late_finish(self.job.first_choice + number, finish)
        elif not choice.note(index, taken):
            raise AttemptOver("failed", f"{place.decode.id} left out token {len(choice.accepted)}")
        if self._scores.complete:  # else tokens wait for what the prompt comes with
            self._accept_all(place, number)

    def _accept_all(self, place: Placement, number: int) -> None:
        """Accept what is here of a choice, in order."""
        choice = self.choices[number]
        while not choice.ended_by and (following := choice.next()) is not None:
            self._accept(place, number, following)

    def _accept(self, place: Placement, number: int, taken: Taken) -> None:
        choice = self.choices[number]
        choice.accepted.append(taken.token)
        self._dispatcher.first_token(place)
        self._lifetime.token(self.job.first_choice + number)
        if taken.finish:
            choice.ended_by = "decode"
        stopped = self._sink.token(self.job.first_choice + number, taken.token, taken.finish, taken.logprobs)
        if stopped and not taken.finish:
            choice.ended_by = "gateway"
            if self.state is State.DECODING:
                self._cancel_choice(place, number)

    def _cancel_choice(self, place: Placement, number: int) -> None:
        if not self.done:  # else the whole attempt is cancelled in a moment
            self._pool.send(place.decode, Cancel(self.id, self.attempt, number))
