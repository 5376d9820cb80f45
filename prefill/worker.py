"""The prefill worker: one loop that receives what has arrived, schedules, runs one step of chunks, and sends.

Slabs leave from inside the step: the hook after each layer's KV is written copies out what decode lacks of that layer
and hands it to ZeroMQ's own thread, while this one computes the next layer. The same hook looks at the control
sockets, so a cancel takes effect between two layers.
"""

from __future__ import annotations

import logging
import time
from collections import deque

import torch
import zmq

from ..engine.block_pool import root_key
from ..engine.cores import Cores, no_cores
from ..engine.grammar import BAD_GRAMMAR, GrammarRefused, Grammars, GrammarsFull, Row
from ..engine.logprobs import prompt_messages, prompt_targets, sampled_logprobs, score_prompts
from ..engine.rate import PromptRate
from ..engine.registration import membership, registration
from ..engine.runner import Chunk, Runner
from ..engine.sampler import NOT_FINITE, SampleRow, sample
from ..engine.setup import Engine
from ..engine.turns import Turns
from ..transfer.channel import FrameCounts
from ..transfer.errors import StepCancelled
from ..transfer.io_threads import hasten_io_threads
from ..transfer.membership import GatewayLost, GatewayTie, Unwanted
from ..transfer.messages import (
    Busy,
    Cancel,
    Failed,
    FirstTokens,
    Gone,
    Message,
    PeerHeartbeat,
    Prefill,
    Register,
    TokenLogprobs,
    WorkerHeartbeat,
)
from ..transfer.messages import (
    Peers as PeerList,
)
from ..transfer.reports import Speed
from ..transfer.sender import LinkOptions, LinkState, Outgoing, PeerLink
from .config import PrefillConfig
from .metrics import PrefillMetrics
from .peers import Peers
from .prompt import Key, Prompt, State, Work
from .scheduler import PrefillLimits, Scheduler

log = logging.getLogger(__name__)


class PrefillWorker:
    """One prefill process. `run` returns after `stop`."""

    def __init__(self, config: PrefillConfig, engine: Engine, host: str, cores: Cores | None = None) -> None:
        self._config = config
        self._host = host
        self._engine = engine
        self._layout = engine.model.layout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._frames = FrameCounts()
        self._metrics = PrefillMetrics()
        worker = config.worker
        self._scheduler = Scheduler(engine.pool, PrefillLimits(worker.chunk_tokens, config.max_waiting), self._root_of)
        self._runner = Runner(engine.model, engine.cache, self._between_layers)
        self._members = membership(self._context, worker, self._frames)
        options = LinkOptions(worker.link, host, engine.device, worker.ring_bytes, worker.curve)
        self._peers = Peers(
            self._context, self._layout, self._frames, worker.death_bound_s, self._link_lost, options
        )
        self._grammars = Grammars(engine.tokenizer)
        self._inbox: deque[tuple[GatewayTie, Prefill]] = deque()
        self._turns = Turns()
        self._incarnation = self._members.worker
        self._step: list[Work] = []
        self._rate = PromptRate()
        self._ready = False
        self._cores = cores or no_cores()
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
        self._engine.warm_up(self._runner)
        hasten_io_threads()
        self._ready = True
        try:
            while not self._stopping and not self._members.may_leave:
                self._cores.look(time.monotonic())
                self._receive()
                batch = self._scheduler.plan(time.monotonic(), self._rate.per_s)
                if batch:
                    self._run_step(batch)
                self._send()
                if self._config.worker.check_invariants:
                    self._check_invariants()
                if not batch:
                    self._wait()
            self._members.say_goodbye()
        finally:
            self._members.close()
            self._peers.close()
            self._grammars.close()
            self._context.destroy(linger=200)
            self._cores.close()

    def _receive(self) -> None:
        self._pump()
        self._grammars.poll()
        self._fail_grammars()
        for _ in range(len(self._inbox)):
            tie, message = self._inbox.popleft()
            if self._members.owner.get((message.request, message.attempt)) is tie:
                self._accept(tie, message)

    def _wait(self) -> None:
        """Sleep until a socket has something, or something is due."""
        sockets = *self._members.sockets, *self._peers.sockets
        self._cores.idle()
        if self._turns.wait(sockets, self._grammars.descriptor, for_device=self._scheduler.is_copying):
            self._cores.busy()

    def _between_layers(self, layer: int) -> None:
        """This layer's KV of the running step is written: ship it, then look at the control sockets."""
        for work in self._step:
            prompt = work.prompt
            if prompt.state is State.COMPUTING:
                prompt.outgoing.ship(self._engine.cache, layer, prompt.table.blocks, work.end)
        self._look_up()

    def _look_up(self) -> None:
        """In the middle of a step: look at the control sockets, and give up a step nobody wants any more."""
        if self._turns.must_look_up:
            self._pump()
            if self._step and all(work.prompt.state is State.FINISHED for work in self._step):
                raise StepCancelled

    def _pump(self) -> None:
        """Control messages: cancels take effect now, heartbeats go out, new prompts wait in the inbox."""
        for tie, event in self._members.poll():
            match event:
                case Cancel(request=request, attempt=attempt, choice=None):
                    self._drop((request, attempt))
                case Cancel():
                    pass  # one choice of several: the others still need the prompt
                case Unwanted(attempt=key):
                    self._drop(key)
                case Gone(request=request, attempt=attempt):
                    self._drop((request, attempt))
                case GatewayLost():
                    self._gateway_lost(tie)
                case PeerList(decode=decode):
                    self._peers.update(self._members.ties.index(tie), decode, self._members.worker)
                case Prefill(request=request, attempt=attempt) as message:
                    self._members.owner[request, attempt] = tie
                    self._inbox.append((tie, message))
                case _:
                    self._frames.drop("unexpected")
        if self._members.worker != self._incarnation:
            self._incarnation = self._members.worker
            self._peers.reconnect_all(self._incarnation)
        for link, peer_message in self._peers.poll(self._members.worker):
            self._heard_from_peer(link, peer_message)
        self._members.tick(self._registration, self._heartbeat)
        self._peers.tick(self._live_on)
        self._turns.looked_up()

    def _gateway_lost(self, tie: GatewayTie) -> None:
        self._inbox = deque(entry for entry in self._inbox if entry[0] is not tie)
        for key in self._members.owned_by(tie):
            self._drop(key)
        self._peers.forget_gateway(self._members.ties.index(tie), self._members.worker)

    # --- prompts ---------------------------------------------------------------------------------------------

    def _accept(self, tie: GatewayTie, message: Prefill) -> None:
        key = message.request, message.attempt
        if self._scheduler.get(key) is not None:
            self._frames.drop("repeated")
            return
        for older in [k for k in self._scheduler.keys if k[0] == message.request and k[1] < message.attempt]:
            self._drop(older)
        link = self._peers.get(message.decode)
        if self._members.draining:
            self._fail(key, "draining", f"{self._members.worker} drains and takes nothing new", retryable=True)
        elif link is None or link.state is not LinkState.LINKED:
            self._fail(key, "no_link", f"no link to {message.decode}", retryable=True)
        elif fault := self._fault(message):
            self._fail(key, "malformed", fault, retryable=False)
        elif reason := self._scheduler.refusal(message):
            self._refuse(key, reason)
        elif self._has_grammar(tie, message):
            outgoing = Outgoing(*key, message.reservation, message.held_tokens, link, self._layout)
            self._scheduler.add(message, outgoing, time.monotonic())

    def _has_grammar(self, tie: GatewayTie, message: Prefill) -> bool:
        """Whether sampling will be possible. A prompt whose grammar is being compiled waits in the inbox."""
        key = message.request, message.attempt
        try:
            if message.params.grammar is None or self._grammars.want(key, message.params.grammar):
                return True
            self._inbox.append((tie, message))
        except GrammarRefused as error:
            self._fail(key, BAD_GRAMMAR, str(error), retryable=False)
        except GrammarsFull as error:
            self._refuse(key, str(error))
        return False

    def _refuse(self, key: Key, why: str) -> None:
        """Not now: the gateway may try elsewhere."""
        self._members.send(key, Busy(*key, why))
        self._members.owner.pop(key, None)

    def _fail_grammars(self) -> None:
        """End the attempts whose grammar cannot be followed any further."""
        for failure in self._grammars.take_failures():
            self._fail(failure.key, failure.reason, failure.detail, retryable=failure.retryable)

    def _fault(self, message: Prefill) -> str:
        """What makes the message senseless; empty if nothing does."""
        if message.held_tokens >= len(message.prompt) + len(message.output):
            return "nothing is left to compute"
        if message.output and message.num_choices > 1:
            return "several choices cannot share one output"
        if max(message.prompt + message.output) >= self._engine.model.vocab_size:
            return f"a token id is not below {self._engine.model.vocab_size}"
        return ""

    def _drop(self, key: Key) -> None:
        """Let go of an attempt, whatever it is doing."""
        self._members.owner.pop(key, None)
        self._grammars.forget(key)
        if self._scheduler.drop(key) is not None:
            self._members.hasten_heartbeat()

    def _fail(self, key: Key, reason: str, detail: str, *, retryable: bool) -> None:
        log.warning("%s attempt %d failed here: %s (%s)", *key, reason, detail)
        self._members.send(key, Failed(*key, reason, detail[:4000], retryable))
        self._drop(key)

    def _link_lost(self, link: PeerLink) -> None:
        for prompt in [p for p in self._scheduler if p.outgoing.link is link]:
            self._fail(prompt.key, "link_lost", f"the link to {link.peer.worker} is gone", retryable=True)

    def _heard_from_peer(self, link: PeerLink, message: Message) -> None:
        match message:
            case Gone(request=request, attempt=attempt):
                prompt = self._scheduler.get((request, attempt))
                if prompt is not None and prompt.outgoing.link is link and prompt.state is not State.SENDING:
                    self._fail(prompt.key, "gone", f"{link.peer.worker} does not want it any more", retryable=True)
            case PeerHeartbeat():
                pass  # it lists what it waits for; what it does not want it answers with Gone

    def _live_on(self, link: PeerLink) -> list[Key]:
        waiting = [(m.request, m.attempt) for _, m in self._inbox if m.decode == link.peer.worker]
        return [p.key for p in self._scheduler if p.outgoing.link is link] + waiting

    # --- one step --------------------------------------------------------------------------------------------

    def _run_step(self, batch: list[Work]) -> None:
        self._cores.busy()
        started, helped_s = time.monotonic(), self._cores.helped_s()
        self._step = batch
        chunks = [_chunk(work) for work in batch]
        sampling = [w.prompt.message for w in batch if w.samples]
        self._grammars.ask(
            [Row((m.request, m.attempt), m.choice, m.output) for m in sampling if m.params.grammar is not None]
        )
        try:
            logits = self._runner.forward(chunks)
            scores = list(score_prompts(self._runner, chunks, self._look_up))
        except StepCancelled:
            return
        finally:
            self._step = []
        elapsed_s, num_tokens = time.monotonic() - started, sum(w.count for w in batch)
        self._metrics.step_seconds.observe(elapsed_s)
        self._metrics.computed_tokens.inc(num_tokens)
        if num_tokens >= self._engine.pool.block_size:  # the few last tokens of a prompt say little about others
            self._rate.add(num_tokens, elapsed_s, self._cores.helped_s() - helped_s)
        for work, entries in zip(batch, scores, strict=True):
            if work.prompt.state is State.COMPUTING:
                self._scheduler.computed(work)
                self._send_scores(work, entries)
        masks = self._grammars.collect(self._pump)
        self._fail_grammars()
        for row, work in enumerate(w for w in batch if w.samples):
            prompt = work.prompt
            if prompt.state is State.COMPUTING:
                self._finish(prompt, logits[row : row + 1], masks.get((prompt.key, prompt.message.choice)))

    def _send_scores(self, work: Work, entries: list[TokenLogprobs] | None) -> None:
        """What the step said of the prompt's own tokens; None when that is not finite."""
        if entries is None:
            self._not_finite(work.prompt)
            return
        for message in prompt_messages(work.prompt.key, work.start + 1, entries):
            self._members.send(work.prompt.key, message)

    def _not_finite(self, prompt: Prompt) -> None:
        prompt.outgoing.abort("logits are not finite")
        self._fail(prompt.key, "nan_logits", "the model produced logits that are not finite", retryable=False)

    def _finish(self, prompt: Prompt, logits: torch.Tensor, mask: bytes | None) -> None:
        """The prompt is computed: sample the next token of every choice, tell the gateway, hand over to decode.

        `logits`: [1, vocab] of the prompt's last token. `mask`: of its grammar, if it has one.
        """
        message = prompt.message
        choices = range(message.choice, message.choice + message.num_choices)
        rows = [SampleRow(message.params, message.prompt, message.output, choice, mask) for choice in choices]
        spread = logits.expand(len(rows), -1)
        tokens = sample(spread, rows, self._engine.model.eos_token_ids)
        if NOT_FINITE in tokens:
            self._not_finite(prompt)
            return
        logprobs = [entry for entry in sampled_logprobs(spread, rows, tokens) if entry is not None]
        self._metrics.prefix_cached_tokens.inc(prompt.num_cached)
        now = time.monotonic()
        first = FirstTokens(
            *prompt.key,
            choice=message.choice,
            index=len(message.output),
            tokens=tokens,
            cached_tokens=min(prompt.num_cached, len(message.prompt)),
            queued_s=prompt.started_at - prompt.arrived_at,
            compute_s=now - prompt.started_at,
            logprobs=logprobs,
        )
        self._members.send(prompt.key, first)
        prompt.outgoing.hand_off(tokens, logprobs)
        self._scheduler.all_sent(prompt)

    # --- what goes out ---------------------------------------------------------------------------------------

    def _send(self) -> None:
        self._members.tick(self._registration, self._heartbeat)
        self._peers.tick(self._live_on)
        for prompt in self._scheduler.in_state(State.SENDING):
            if prompt.outgoing.link.drained:
                self._drop(prompt.key)

    def _registration(self) -> Register:
        worker, config = self._members.worker, self._config
        return registration(worker, "prefill", config.worker, self._engine, self._host, config.max_waiting)

    def _heartbeat(self, tie: GatewayTie) -> WorkerHeartbeat:
        counts = self._engine.pool.counts
        return WorkerHeartbeat(
            seen_seq=tie.seen_seq,
            live=sorted(self._members.owned_by(tie)),
            ready=self._ready,
            free_blocks=counts.free + counts.cached,
            held_blocks=counts.held,
            running=len(self._scheduler.in_state(State.COMPUTING)),
            waiting=len(self._scheduler.in_state(State.WAITING)) + len(self._inbox),
            queued_tokens=sum(p.num_missing for p in self._scheduler if p.state in (State.WAITING, State.COMPUTING)),
            draining=self._members.draining,
            links=self._peers.report(),
            metrics=self._metrics.snapshot_with(self._peers, self._engine.pool, self._frames, self._cores),
            speed=Speed(
                prompt_tokens_per_s=self._rate.per_s or 0.0,
                lone_tokens_per_s=self._rate.lone_per_s(borrows=self._cores.borrows) or 0.0,
            ),
        )

    def _check_invariants(self) -> None:
        self._scheduler.check_invariants()
        owned = set(self._members.owner)
        inbox = {(message.request, message.attempt) for _, message in self._inbox}
        assert self._scheduler.keys | (inbox & owned) == owned, "owners and prompts differ"


def _chunk(work: Work) -> Chunk:
    prompt, params = work.prompt, work.prompt.message.params
    targets = prompt_targets(params, prompt.message.prompt, work.start, work.count)
    return Chunk(
        prompt.tokens[work.start : work.end], work.start, prompt.table.blocks, work.samples,
        targets, params.prompt_logprobs or 0, min(max(len(prompt.message.prompt) - work.start, 0), work.count),
    )  # fmt: skip
