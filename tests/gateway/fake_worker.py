"""The gateway's peers in tests: a prefill and a decode worker that speak the real protocol over real ZeroMQ.

They compute nothing: the token at position p of a text is a function of p. What they do not do (answer, heartbeat,
go on) is switched off by plain attributes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import zmq

from pdserve.transfer.channel import Dealer, FrameCounts
from pdserve.transfer.layout import KVLayout, LayerShape
from pdserve.transfer.messages import (
    Busy,
    Cancel,
    Drain,
    Failed,
    FirstTokens,
    GatewayHeartbeat,
    Gone,
    Leaving,
    Message,
    Peers,
    Prefill,
    PromptLogprobs,
    Register,
    Registered,
    RegistrationDenied,
    Reserve,
    Reserved,
    TokenLogprobs,
    Tokens,
    WorkerHeartbeat,
)
from pdserve.transfer.reports import Family, Link, Sample, Speed

FINGERPRINT = "f" * 64
MODEL = "m"
Key = tuple[str, int]


def layout(fingerprint: str = FINGERPRINT, dtype: str = "float32", quantization: str = "none") -> KVLayout:
    return KVLayout(fingerprint, dtype, (LayerShape(1, 4, 4),), quantization)


def token_at(position: int) -> int:
    """What every fake model puts at `position` of prompt + output: a letter, with the byte-level test tokenizer."""
    return 67 + position % 26


def said(token: int) -> TokenLogprobs:
    """What every fake model thinks of a token."""
    return TokenLogprobs(-token / 100, 1, [(token, -token / 100)])


def prompt_messages(request: str, attempt: int, prompt: list[int], leave_out: int = 0) -> list[PromptLogprobs]:
    """The scores of a prompt, 16 tokens a message, without the first `leave_out` messages."""
    parts = [(first, prompt[first : first + 16]) for first in range(1, len(prompt), 16)]
    return [
        PromptLogprobs(request, attempt, first, [said(token) for token in part]) for first, part in parts[leave_out:]
    ]


_numbers = itertools.count(1)


@dataclass(eq=False)
class FakeWorker:
    """Registers, beats, and keeps all it was sent in `received`. `run` until `kill` (as if by SIGKILL)."""

    context: zmq.Context
    address: str
    name: str
    role: str = "decode"
    model: str = MODEL
    layout: KVLayout = field(default_factory=layout)
    max_sequences: int = 8
    num_blocks: int = 64
    max_model_len: int = 1000
    beating: bool = True  # False: heartbeats stop, everything else goes on
    frozen: bool = False  # True: like SIGSTOP
    ready: bool = True
    families: list[Family] = field(default_factory=list)
    queued_tokens: int = 0
    draining: bool = False
    link_state: str = "linked"  # of a prefill worker's links to the decode workers that it hears of from now on
    pid: int = 0  # 0: one of its own

    def __post_init__(self) -> None:
        self.worker = f"{self.name}#{next(_numbers):08x}"
        self.frames = FrameCounts()
        self.dealer = Dealer(self.context, self.address, f"{self.worker}/1", self.frames)
        self.received: list[Message] = []
        self.live: set[Key] = set()
        self.registered = False
        self.denied: RegistrationDenied | None = None
        self.decode_links: list[Link] = []
        self.killed = False
        self._seen_seq = 0
        self._wanted: set[Key] = set()

    def of(self, kind: type[Message]) -> list[Message]:
        return [m for m in self.received if isinstance(m, kind)]

    def register(self) -> None:
        decode = self.role == "decode"
        self.dealer.send(
            Register(
                worker=self.worker, role=self.role, model=self.model, layout=self.layout, host="h",
                bulk_address="ipc:///nowhere/b" if decode else "", peer_address="ipc:///nowhere/c" if decode else "",
                links=["zmq"], block_size=16, num_blocks=self.num_blocks, max_model_len=self.max_model_len,
                max_sequences=self.max_sequences, pid=self.pid or int(self.worker.partition("#")[2], 16),
            )
        )  # fmt: skip

    def kill(self) -> None:
        self.killed = True
        self.dealer.close()

    def leave(self) -> None:
        self.dealer.send(Leaving(self.worker))

    async def run(self) -> None:
        next_beat = next_register = 0.0
        loop = asyncio.get_running_loop()
        while not self.killed:
            now = loop.time()
            if not self.frozen:
                if not self.registered and self.denied is None and now >= next_register:
                    next_register = now + 0.3
                    self.register()
                for received in self.dealer.receive():
                    self.received.append(received.message)
                    self.handle(received.message)
                self.step()
                if self.registered and self.beating and now >= next_beat:
                    next_beat = now + 0.05
                    self.beat()
            await asyncio.sleep(0.003)

    @property
    def speed(self) -> Speed:
        """Prefill is so much faster that it gets all prompts, however late decode answers."""
        tokens_per_s = 1000.0 if self.role == "prefill" else 1.0
        return Speed(prompt_tokens_per_s=tokens_per_s, lone_tokens_per_s=tokens_per_s)

    def beat(self) -> None:
        speed = self.speed
        self.dealer.send(
            WorkerHeartbeat(
                seen_seq=self._seen_seq, live=sorted(self.live), ready=self.ready, free_blocks=self.num_blocks,
                held_blocks=len(self.live), running=len(self.live), waiting=0, queued_tokens=self.queued_tokens,
                draining=self.draining, links=self.decode_links, metrics=self.families, speed=speed,
            )
        )  # fmt: skip

    def handle(self, message: Message) -> None:
        match message:
            case Registered():
                self.registered = True
            case RegistrationDenied():
                self.denied = message
            case GatewayHeartbeat():
                self._seen_seq = message.seq
                self._wanted = {(request, attempt) for request, attempt in message.live}
            case Drain():
                self.draining = True
            case Peers():
                link = "zmq" if self.link_state == "linked" else ""
                self.decode_links = [Link(p.worker, link, self.link_state, "", 0) for p in message.decode]
            case Cancel(choice=None) | Gone():
                self.live.discard((message.request, message.attempt))

    def step(self) -> None:
        """What it does on its own in every turn."""


@dataclass(eq=False)
class FakeDecode(FakeWorker):
    """Sends one token per choice in every turn, at most `stop_after` of them, as fast as `token_interval_s` allows."""

    answering: bool = True  # False: it never answers a Reserve
    stop_after: int = 1 << 30
    token_interval_s: float = 0.0
    held_tokens: int = 0
    local_always: bool = False
    backwards: bool = False  # send the tokens of one turn in reversed order, and each twice
    eos_at: int | None = None  # position at which the token is EOS (0)
    burst: int = 1  # tokens per choice in one turn

    def __post_init__(self) -> None:
        super().__post_init__()
        self.jobs: dict[Key, Reserve] = {}
        self.started: dict[Key, list[list[int]]] = {}
        self.cancelled_choices: dict[Key, set[int]] = defaultdict(set)
        self.reservations: dict[int, Key] = {}
        self._last = 0.0

    def handle(self, message: Message) -> None:
        super().handle(message)
        if isinstance(message, Reserve):
            key = message.request, message.attempt
            self.live.add(key)
            self.jobs[key] = message
            if self.answering:
                local = self.local_always or message.local_prefill == "always"
                number = len(self.reservations) + 1
                self.reservations[number] = key
                self.dealer.send(Reserved(*key, number, self.held_tokens, local, message.local_reason, 30.0))
                if local:
                    self.start(key)
        elif isinstance(message, Cancel) and message.choice is not None:
            self.cancelled_choices[message.request, message.attempt].add(message.choice)
        elif isinstance(message, Cancel):
            self.started.pop((message.request, message.attempt), None)

    def start(self, key: Key) -> None:
        """The KV is here (a handoff, in a real system)."""
        if key in self.live:
            job = self.jobs[key]
            if job.params.prompt_logprobs is not None and (self.local_always or job.local_prefill == "always"):
                for message in prompt_messages(*key, job.prompt):
                    self.dealer.send(message)
            self.started[key] = [list(output) for output in self.jobs[key].outputs]

    def step(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._last < self.token_interval_s:
            return
        self._last = now
        items = []
        for key, outputs in list(self.started.items()):
            job = self.jobs[key]
            for choice, output in enumerate(outputs):
                for _ in range(self.burst):
                    finished = len(output) >= job.params.max_tokens or (output and output[-1] == 0)
                    if finished or job.finished[choice] or choice in self.cancelled_choices[key]:
                        break
                    if len(output) >= self.stop_after:
                        break
                    position = len(job.prompt) + len(output)
                    output.append(0 if position == self.eos_at else token_at(position))
                    finish = "stop" if output[-1] == 0 else "length" if len(output) == job.params.max_tokens else ""
                    items.append((*key, choice, len(output) - 1, output[-1], finish))
            over = [
                job.finished[choice] or len(output) >= job.params.max_tokens or (output and output[-1] == 0)
                for choice, output in enumerate(outputs)
            ]
            if all(over):
                del self.started[key]
                self.live.discard(key)
        if items:
            if self.backwards:
                items = [item for item in reversed(items) for _ in range(2)]
            asked = [at for at, item in enumerate(items) if self.jobs[item[:2]].params.logprobs is not None]
            self.dealer.send(Tokens(items, {at: said(items[at][4]) for at in asked}))


@dataclass(eq=False)
class FakePrefill(FakeWorker):
    """Answers a Prefill with the first tokens, and starts the decode worker as its handoff would."""

    role: str = "prefill"
    decodes: list[FakeDecode] = field(default_factory=list)
    answering: bool = True  # False: it takes the prompt and never gets to it
    handing_over: bool = True  # False: FirstTokens go out, the handoff does not
    busy_times: int = 0  # how many prompts to turn away first
    no_link_times: int = 0  # how many prompts to refuse first, since the link to decode is not there after all
    cached_tokens: int = 0
    leaving_out: int = 0  # messages of the next prompt's scores that are lost

    def handle(self, message: Message) -> None:
        super().handle(message)
        if not isinstance(message, Prefill):
            return
        key = message.request, message.attempt
        if self.no_link_times > 0:
            self.no_link_times -= 1
            self.dealer.send(Failed(*key, "no_link", f"no link to {message.decode}", True))
            return
        if self.busy_times > 0:
            self.busy_times -= 1
            self.dealer.send(Busy(*key, "full"))
            return
        self.live.add(key)
        if not self.answering:
            return
        index = len(message.output)
        first = [token_at(len(message.prompt) + index)] * message.num_choices
        if message.params.prompt_logprobs is not None:
            for part in prompt_messages(*key, message.prompt, self.leaving_out):
                self.dealer.send(part)
            self.leaving_out = 0
        logprobs = [said(token) for token in first] if message.params.logprobs is not None else []
        self.dealer.send(FirstTokens(*key, message.choice, index, first, self.cached_tokens, 0.0, 0.0, logprobs))
        if self.handing_over:
            self.live.discard(key)
            for decode in self.decodes:
                if decode.worker == message.decode:
                    decode.start(key)


def counter(name: str, value: float, **labels: str) -> Family:
    return Family(name, "counter", "help", [Sample(f"{name}_total", labels, value)])
