"""The decode worker: one loop that receives what has arrived, schedules, runs one step, and sends what came of it.

The loop's thread owns the model, the pool and every sequence. While a step runs, the hook between two layers looks at
the control sockets too, so a cancel, a heartbeat or a reservation never waits for a long chunk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as ListOf

import zmq

from ..engine.block_pool import root_key
from ..engine.cores import Cores, no_cores
from ..engine.grammar import BAD_GRAMMAR, GrammarRefused, Grammars, GrammarsFull
from ..engine.logprobs import prompt_messages
from ..engine.registration import membership, registration
from ..engine.setup import Engine
from ..engine.turns import Turns
from ..transfer.channel import FrameCounts, Received
from ..transfer.errors import StepCancelled, TransferError
from ..transfer.io_threads import hasten_io_threads
from ..transfer.membership import GatewayLost, GatewayTie, Unwanted
from ..transfer.messages import (
    Abort,
    Busy,
    Cancel,
    Failed,
    Gone,
    Handoff,
    Message,
    PeerHeartbeat,
    Register,
    Reserve,
    Reserved,
    Slab,
    TokenLogprobs,
    WorkerHeartbeat,
)
from ..transfer.receiver import Receiver
from ..transfer.slab import store_slab
from .config import DecodeConfig
from .intake import Intake, worker_of
from .metrics import DecodeMetrics
from .outbox import Outbox
from .preemption import SwapSpace
from .scheduler import DecodeLimits, Plan, Scheduler
from .sequence import Key, Sequence, State, Work
from .speed import ChunkLimits, Speeds
from .stepper import Scores, Stepper

log = logging.getLogger(__name__)

BUSY_INTAKE_BYTES = 16 * 1024 * 1024
IDLE_INTAKE_BYTES = 256 * 1024 * 1024


class DecodeWorker:
    """One decode process. `run` returns after `stop`."""

    def __init__(self, config: DecodeConfig, engine: Engine, host: str, cores: Cores | None = None) -> None:
        self._config = config
        self._host = host
        self._engine = engine
        self._layout = engine.model.layout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._frames = FrameCounts()
        self._metrics = DecodeMetrics()
        swap = SwapSpace(config.swap_bytes // self._layout.bytes_per_token)
        limits = DecodeLimits(
            max_sequences=config.max_sequences,
            max_model_len=engine.model.max_model_len,
            vocab_size=engine.model.vocab_size,
            local_tokens=config.local_tokens,
            transfer_deadline_s=config.transfer_deadline_s,
            preemption=config.preemption,
        )
        self._scheduler = Scheduler(engine.pool, limits, self._root_of, engine.model.eos_token_ids, swap)
        self._receiver = Receiver(self._layout)
        self._grammars = Grammars(engine.tokenizer)
        self._speeds = Speeds(ChunkLimits(config.worker.chunk_tokens, engine.pool.block_size, config.itl_slo_s))
        self._cores = cores or no_cores()
        self._stepper = Stepper(
            engine, swap, self._metrics, self._between_layers, self._grammars, self._speeds,
            self._cores, config.itl_slo_s,
        )  # fmt: skip
        self._intake = Intake(
            self._context, config.bulk_address, config.peer_address, self._layout, self._frames, config.worker.curve,
            config.worker.link, engine.device, config.worker.ring_bytes,
        )  # fmt: skip
        self._members = membership(self._context, config.worker, self._frames)
        self._inbox: deque[tuple[GatewayTie, Message]] = deque()
        self._outbox = Outbox()
        self._turns = Turns()
        self._ready = False
        self._stopping = False

    def _root_of(self, cache_salt: str) -> bytes:
        return root_key(self._layout.fingerprint, self._layout.dtype, cache_salt)

    def drain(self) -> None:
        """Take nothing new, and end when nothing is left (signal-safe)."""
        self._members.drain()

    def stop(self) -> None:
        """Ask the loop to end after its turn (signal-safe)."""
        self._stopping = True

    # --- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`, or `drain` and nothing left. Raises RegistrationRefused if a gateway says no for good."""
        self._stepper.warm_up()
        hasten_io_threads()
        self._ready = True
        try:
            while not self._stopping and not self._members.may_leave:
                self._cores.look(time.monotonic())
                self._receive()
                plan = self._scheduler.plan(time.monotonic(), self._chunk_tokens)
                self._announce(plan)
                self._stepper.move_swapped(plan)
                if plan.batch:
                    self._run_step(plan.batch)
                self._send()
                if self._config.worker.check_invariants:
                    self._check_invariants()
                if not plan.batch:
                    self._wait()
            self._members.say_goodbye()
        finally:
            self._members.close()
            self._intake.close()
            self._grammars.close()
            self._context.destroy(linger=200)
            self._cores.close()

    def _receive(self) -> None:
        self._pump()
        self._grammars.poll()
        self._fail_grammars()
        self._take_requests()
        busy = any(s.state is State.RUNNING for s in self._scheduler)
        for received in self._intake.poll_bulk(BUSY_INTAKE_BYTES if busy else IDLE_INTAKE_BYTES):
            self._take(received)
        for sequence in self._scheduler.expired(time.monotonic()):
            self._fail(sequence.key, "transfer_deadline", "no slab came in time", retryable=True)

    def _wait(self) -> None:
        """Sleep until a socket has something, or something is due."""
        sockets = *self._members.sockets, *self._intake.sockets
        self._stepper.wishes.pause()
        self._cores.idle()  # and so it stays while slabs come in: they take a moment each, a step is what takes long
        self._turns.wait(sockets, self._grammars.descriptor, for_device=self._intake.must_look_again)

    def _between_layers(self) -> None:
        """Called in the middle of a step: look at the control sockets, and give up a step nobody wants any more.

        Who asks for a reservation need not wait for the end of the step: the blocks of those in it are theirs already.
        """
        if not self._turns.must_look_up:
            return
        self._pump()
        self._take_requests()
        self._announce(self._scheduler.admit(time.monotonic()))
        step = self._stepper.running
        if step and all(work.sequence.state is State.FINISHED for work in step):
            raise StepCancelled

    def _pump(self) -> None:
        """Control messages: cancels take effect now, heartbeats go out, the rest waits in the inbox."""
        for tie, event in self._members.poll():
            match event:
                case Cancel(request=request, attempt=attempt, choice=choice):
                    self._drop((request, attempt), choice)
                case Unwanted(attempt=key):
                    self._drop(key)
                case GatewayLost():
                    self._inbox = deque(entry for entry in self._inbox if entry[0] is not tie)
                    for key in self._members.owned_by(tie):
                        self._drop(key)
                case Gone(request=request, attempt=attempt):
                    self._drop((request, attempt))
                case Reserve(request=request, attempt=attempt) as message:
                    self._members.owner[request, attempt] = tie
                    self._inbox.append((tie, message))
                case message:
                    self._inbox.append((tie, message))
        for identity, heartbeat in self._intake.poll_control(self._members.worker):
            self._heard_from_peer(identity, heartbeat)
        self._members.tick(self._registration, self._heartbeat)
        self._intake.send_credits()
        self._turns.looked_up()

    # --- requests --------------------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        for _ in range(len(self._inbox)):
            tie, message = self._inbox.popleft()
            match message:
                case Reserve():
                    self._reserve(tie, message)
                case _:
                    self._frames.drop("unexpected")

    def _reserve(self, tie: GatewayTie, message: Reserve) -> None:
        key = message.request, message.attempt
        if self._members.owner.get(key) is not tie:
            return  # cancelled while it stood in the inbox
        if self._scheduler.find(key):
            self._frames.drop("repeated")
            return
        for older in [k for k in self._scheduler.keys if k[0] == message.request and k[1] < message.attempt]:
            self._drop(older)
        if self._members.draining:
            self._fail(key, "draining", f"{self._members.worker} drains and takes nothing new", retryable=True)
            return
        if refusal := self._scheduler.refusal(message):
            self._fail(key, *refusal, retryable=False)
            return
        try:
            if message.params.grammar is not None and not self._grammars.want(key, message.params.grammar):
                self._inbox.append((tie, message))  # until it is compiled
                return
        except GrammarRefused as error:
            self._fail(key, BAD_GRAMMAR, str(error), retryable=False)
            return
        except GrammarsFull as error:
            self._members.send(key, Busy(*key, str(error)))
            self._forget(key)
            return
        self._scheduler.add(message, time.monotonic())
        if not self._scheduler.find(key):
            self._forget(key)

    def _fail_grammars(self) -> None:
        """End the attempts whose grammar cannot be followed any further."""
        for failure in self._grammars.take_failures():
            self._fail(failure.key, failure.reason, failure.detail, retryable=failure.retryable)

    def _announce(self, plan: Plan) -> None:
        """Tell the gateways what the plan decided."""
        modes = (("swap", plan.swapped_out), ("move", plan.moved), ("recompute", plan.recomputed))
        for mode, victims in modes:
            self._metrics.preemptions.labels(mode).inc(len(victims))
        for sequence in plan.revoked:
            self._receiver.forget(*sequence.key)
            self._fail(sequence.key, "revoked", "its reservation was needed by running sequences", retryable=True)
        for sequence in plan.moved:
            self._fail(sequence.key, "preempted", "its blocks were needed by better-ranked sequences", retryable=True)
        for sequence in plan.admitted:
            held = sequence.table.num_computed
            self._metrics.prefix_cached_tokens.inc(held)
            local = sequence.state is State.COMPUTING
            if local:
                self._metrics.local_prefill.labels(sequence.local_reason).inc()
            else:
                self._receiver.expect(*sequence.key, sequence.reservation, sequence.prefill, held, len(sequence.tokens))
            if not sequence.announced:
                for sibling in self._scheduler.find(sequence.key):
                    sibling.announced = True
                answer = Reserved(
                    *sequence.key, sequence.reservation, held, local,
                    sequence.local_reason, self._config.transfer_deadline_s,
                )  # fmt: skip
                self._members.send(sequence.key, answer)

    def _drop(self, key: Key, choice: int | None = None) -> None:
        """Let go of an attempt, or of one of its choices, whatever it is doing."""
        self._scheduler.drop(key, choice)
        if not self._scheduler.find(key):
            self._forget(key)
            self._members.hasten_heartbeat()

    def _forget(self, key: Key) -> None:
        self._receiver.forget(*key)
        self._grammars.forget(key)
        self._members.owner.pop(key, None)

    def _fail(self, key: Key, reason: str, detail: str, *, retryable: bool) -> None:
        log.warning("%s attempt %d failed here: %s (%s)", *key, reason, detail)
        self._outbox.send()  # what it has said already comes before its end
        self._members.send(key, Failed(*key, reason, detail[:4000], retryable))
        self._drop(key)

    # --- slabs -----------------------------------------------------------------------------------------------

    def _take(self, received: Received) -> None:
        message = received.message
        assert isinstance(message, Slab | Handoff | Abort)
        key = message.request, message.attempt
        sequence = self._scheduler.receiving(key)
        sender = worker_of(received.sender)
        if isinstance(message, Abort):
            if sequence is not None and sequence.reservation == message.reservation and sequence.prefill == sender:
                self._fail(key, "prefill_aborted", message.reason, retryable=True)
            return
        entry = self._receiver.find(message, sender)
        if sequence is None or entry is None:
            self._frames.drop("unknown_reservation")
            self._intake.tell_gone(received.sender, *key)
            return
        try:
            if isinstance(message, Slab):
                assert received.payload is not None
                self._receiver.check(entry, message, received.payload)
                store_slab(self._engine.cache, message, sequence.table.blocks, received.payload)
                self._receiver.taken(entry, message, received.payload.nbytes)
                self._metrics.transfer_bytes.labels(self._intake.link_of(received)).inc(received.payload.nbytes)
                self._scheduler.progress(sequence, time.monotonic())
            else:
                self._hand_over(sequence, message, self._receiver.complete(entry))
        except TransferError as error:
            self._frames.drop(error.reason)
            self._intake.tell_gone(received.sender, *key)
            self._fail(key, error.reason, error.detail, retryable=True)

    def _hand_over(self, sequence: Sequence, message: Handoff, elapsed_s: float) -> None:
        """The prompt's KV is whole: every choice starts from the token prefill sampled for it."""
        if len(message.tokens) != sequence.num_choices:
            raise TransferError("bad_handoff", f"{len(message.tokens)} tokens for {sequence.num_choices} choices")
        wanted = sequence.num_choices if sequence.params.logprobs is not None else 0
        if len(message.logprobs) != wanted:
            raise TransferError("bad_handoff", f"{len(message.logprobs)} log probabilities for {wanted} tokens")
        self._metrics.transfer_seconds.observe(elapsed_s)
        self._scheduler.received(sequence)
        self._start(sequence, message.tokens, message.logprobs or [None] * sequence.num_choices)

    def _start(self, sequence: Sequence, tokens: list[int], logprobs: ListOf[TokenLogprobs | None]) -> None:
        """Split into choices and give each its first token (`tokens` and `logprobs` in choice order)."""
        first = sequence.choice
        family, copies = self._scheduler.split(sequence)
        for source, target in copies:
            self._engine.cache.copy_block(source, target)
        for member in family:
            self._append(member, tokens[member.choice - first], logprobs[member.choice - first])

    def _heard_from_peer(self, identity: str, heartbeat: PeerHeartbeat) -> None:
        """Prefill lists what it is working on: that is progress. What we do not know it must stop."""
        self._scheduler.listed(heartbeat.worker, set(heartbeat.live), time.monotonic())
        for key in heartbeat.live:
            if key not in self._members.owner:
                self._intake.tell_gone(identity, *key)
        live = [s.key for s in self._scheduler if s.state is State.RECEIVING and s.prefill == heartbeat.worker]
        self._intake.heartbeat(identity, self._members.worker, live)

    # --- one step --------------------------------------------------------------------------------------------

    def _chunk_tokens(self, running: int) -> int:
        expecting = any(s.state is State.RECEIVING for s in self._scheduler)
        return self._speeds.chunk_tokens(running, expecting=expecting)

    def _run_step(self, batch: list[Work]) -> None:
        self._cores.busy()
        step = self._stepper.run(batch)
        if step is None:
            return
        logits, scores = step
        for work, entries in zip(batch, scores, strict=True):
            if work.sequence.state is not State.FINISHED:
                self._scheduler.computed(work)
                self._send_scores(work, entries)
        for sequence, tokens, logprobs in self._stepper.pick(logits, [work for work in batch if work.samples]):
            if tokens is None:
                self._not_finite(sequence)
            elif sequence.state is State.COMPUTING:
                self._start(sequence, tokens, logprobs)
            elif sequence.state is State.RUNNING:
                self._append(sequence, tokens[0], logprobs[0])
        self._fail_grammars()

    def _send_scores(self, work: Work, entries: Scores) -> None:
        """What the step said of the prompt's own tokens, to the gateway ahead of any token."""
        if entries is None:
            self._not_finite(work.sequence)
            return
        for message in prompt_messages(work.sequence.key, work.start + 1, entries):
            self._members.send(work.sequence.key, message)
        self._scheduler.scored(work, len(entries))

    def _not_finite(self, sequence: Sequence) -> None:
        self._fail(sequence.key, "nan_logits", "the model produced logits that are not finite", retryable=False)

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        tie = self._members.owner.get(sequence.key)
        index = len(sequence.output)
        sequence.streaming_since = sequence.streaming_since or time.monotonic()
        finish = self._scheduler.append(sequence, token)
        if tie is not None:
            self._outbox.add(tie, (*sequence.key, sequence.choice, index, token, finish), logprobs)
        if finish and not self._scheduler.find(sequence.key):
            self._forget(sequence.key)
            self._members.hasten_heartbeat()

    # --- what goes out ---------------------------------------------------------------------------------------

    def _send(self) -> None:
        self._outbox.send()
        self._members.tick(self._registration, self._heartbeat)
        self._intake.send_credits()

    def _registration(self) -> Register:
        addresses = self._config.advertise(self._intake.addresses)
        worker, config = self._members.worker, self._config
        return registration(
            worker, "decode", config.worker, self._engine, self._host, config.max_sequences, addresses
        )  # fmt: skip

    def _heartbeat(self, tie: GatewayTie) -> WorkerHeartbeat:
        states = [s.state for s in self._scheduler]
        counts = self._engine.pool.counts
        return WorkerHeartbeat(
            seen_seq=tie.seen_seq,
            live=sorted(self._members.owned_by(tie)),
            ready=self._ready,
            free_blocks=counts.free + counts.cached,
            held_blocks=counts.held,
            running=sum(state in (State.RUNNING, State.COMPUTING) for state in states),
            waiting=sum(state is State.WAITING for state in states),
            queued_tokens=self._scheduler.queued_tokens,
            draining=self._members.draining,
            links=[],
            metrics=self._metrics.snapshot(self._engine.pool, self._frames, self._cores),
            speed=self._speeds.report(
                states.count(State.RUNNING), self._scheduler.streaming_s(time.monotonic()), borrows=self._cores.borrows
            ),
        )

    def _check_invariants(self) -> None:
        self._scheduler.check_invariants()
        owned = set(self._members.owner)
        inbox = {(m.request, m.attempt) for _, m in self._inbox if isinstance(m, Reserve)}
        assert self._scheduler.keys | (inbox & owned) == owned, "owners and sequences differ"
