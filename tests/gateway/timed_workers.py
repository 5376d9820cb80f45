"""Workers that take their time but compute nothing, with the scheduling of real ones: what a load does to a system,
without the machine it would need.

What a prefill step computes, the real scheduler says. A decode step takes a fixed time, some for each sequence in it,
and some for each token of the prompt that it computes a part of; how large that part is, the real `Speeds` says. While
a worker has nothing to do, its neighbour has its core, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.decode.speed import ChunkLimits, Speeds
from pdserve.engine.block_pool import BlockPool, root_key
from pdserve.engine.rate import PromptRate
from pdserve.prefill.prompt import Work
from pdserve.prefill.scheduler import PrefillLimits, Scheduler
from pdserve.transfer.messages import Cancel, Message, Prefill, Tokens
from pdserve.transfer.reports import Speed
from pdserve.transfer.sender import Outgoing
from tests.gateway.fake_worker import FakeDecode, FakePrefill, FakeWorker, Key, layout, token_at
from tests.gateway.harness import Sink

BLOCK_TOKENS = 16
CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Costs:
    """Of one core. `beside_s`: of a prompt's token in a step with others, where chunks are small.

    `two_cores`: the part of its time that a step needs with an idle neighbour's core. `sending`: the multiple of its
    time that a step of prefill needs since it sends KV, and an idle decode worker takes it in on its core."""

    token_s: float = 0.001
    beside_s: float = 0.001
    step_s: float = 0.02
    sequence_s: float = 0.002
    two_cores: float = 1.0
    sending: float = 1.0

    def step(self, running: int, prompt_tokens: int) -> float:
        if not running:
            return self.token_s * prompt_tokens
        return self.step_s + self.sequence_s * running + self.beside_s * prompt_tokens


@dataclass(frozen=True)
class Step:
    running: int
    prompt_tokens: int
    length_s: float


@dataclass(eq=False)
class TimedDecode(FakeDecode):
    """`steps`: what it did. A step that ends late, since this process was busy, does not delay the next one."""

    costs: Costs = field(default_factory=Costs)
    slo_s: float | None = None
    lent: Callable[[], bool] = lambda: False  # is the neighbour's core there to be used?
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.speeds = Speeds(ChunkLimits(CHUNK_TOKENS, BLOCK_TOKENS, self.slo_s))
        self.missing: dict[Key, int] = {}  # prompts computed here, in order
        self.since: dict[Key, float] = {}  # when streams began
        self._running: set[Key] = set()
        self._chunk = 0
        self._ends_s: float | None = None

    @property
    def idle(self) -> bool:
        return self._ends_s is None

    def handle(self, message: Message) -> None:
        super().handle(message)
        if isinstance(message, Cancel):
            self._forget()

    def start(self, key: Key) -> None:
        """It was reserved to be computed here, or has been handed over."""
        job = self.jobs[key]
        if job.local_prefill == "always" and not any(job.outputs):
            self.missing[key] = len(job.prompt)
        else:
            self._stream(key)

    def _stream(self, key: Key) -> None:
        """The first token is known."""
        super().start(key)
        if key not in self.started:
            return
        self.since[key] = asyncio.get_running_loop().time()
        if not any(self.started[key]):
            token = token_at(len(self.jobs[key].prompt))
            self.started[key] = [[token]]
            self.dealer.send(Tokens([(*key, 0, 0, token, "")]))

    def step(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._ends_s is None:
            self._begin(now)
        elif now >= self._ends_s:
            ended_s = self._ends_s
            self._end()
            self._begin(ended_s)

    def _begin(self, now: float) -> None:
        self._running = set(self.started)
        expecting = len(self.live) > len(self.started) + len(self.missing)
        most = self.speeds.chunk_tokens(len(self._running), expecting=expecting)
        self._chunk = min(next(iter(self.missing.values()), 0), most)
        if not self._running and not self._chunk:
            self._ends_s = None
            return
        helped = self.costs.two_cores < 1 and self.lent()
        length_s = self.costs.step(len(self._running), self._chunk) * (self.costs.two_cores if helped else 1.0)
        self.steps.append(Step(len(self._running), self._chunk, length_s))
        self.speeds.measured(len(self._running), self._chunk, length_s, length_s * helped)
        self._ends_s = now + length_s

    def _end(self) -> None:
        """Every sequence that was in the step gets its token, and the prompt may be complete."""
        others = {key: outputs for key, outputs in self.started.items() if key not in self._running}
        self.started = {key: outputs for key, outputs in self.started.items() if key in self._running}
        super().step()
        self.started |= others
        if self._chunk and self.missing:
            key, missing = next(iter(self.missing.items()))
            self.missing[key] = missing - self._chunk
            if self.missing[key] <= 0:
                del self.missing[key]
                self._stream(key)
        self._forget()

    def _forget(self) -> None:
        for held in (self.missing, self.since, self.started):
            for key in held.keys() - self.live:
                del held[key]

    @property
    def speed(self) -> Speed:
        self.queued_tokens = sum(self.missing.values())
        streaming_s = asyncio.get_running_loop().time() - min(self.since.values()) if self.since else 0.0
        return self.speeds.report(len(self.started), streaming_s, borrows=self.costs.two_cores < 1)


@dataclass(frozen=True)
class Pipe:
    """What the scheduler sees of a link."""

    has_room: bool = True
    copied_out: bool = True


@dataclass(eq=False)
class TimedPrefill(FakePrefill):
    costs: Costs = field(default_factory=Costs)
    lent: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rate = PromptRate()
        pool = BlockPool(self.num_blocks, BLOCK_TOKENS, prefix_caching=False)
        self.scheduler = Scheduler(pool, PrefillLimits(CHUNK_TOKENS), lambda salt: root_key("m", salt))
        self._batch: list[Work] = []
        self._ends_s = 0.0

    @property
    def idle(self) -> bool:
        return not self._batch

    def handle(self, message: Message) -> None:
        if isinstance(message, Prefill):
            key = message.request, message.attempt
            self.live.add(key)
            outgoing = Outgoing(*key, 1, 0, Pipe(), layout())  # type: ignore[arg-type]
            self.scheduler.add(message, outgoing, asyncio.get_running_loop().time())
            return
        FakeWorker.handle(self, message)
        for key in self.scheduler.keys - self.live:
            self.scheduler.drop(key)

    def _begin(self, now: float) -> None:
        self._batch = self.scheduler.plan(now, self.rate.per_s)
        count = sum(work.count for work in self._batch)
        helped = self.costs.two_cores < 1 and self.lent()
        length_s = count * self.costs.token_s * self.costs.sending * (self.costs.two_cores if helped else 1.0)
        if count:
            self.rate.add(count, length_s, length_s * helped)
        self._ends_s = now + length_s

    def step(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self._batch:
            self._begin(now)
        elif now >= self._ends_s:
            for work in self._batch:
                if work.prompt.key in self.scheduler.keys:
                    self.scheduler.computed(work)
                    if work.samples:
                        self.scheduler.all_sent(work.prompt)
                        self.scheduler.drop(work.prompt.key)
                        FakePrefill.handle(self, work.prompt.message)
            self._begin(self._ends_s)

    @property
    def speed(self) -> Speed:
        self.queued_tokens = sum(prompt.num_missing for prompt in self.scheduler)
        lone = self.rate.lone_per_s(borrows=self.costs.two_cores < 1)
        return Speed(prompt_tokens_per_s=self.rate.per_s or 0.0, lone_tokens_per_s=lone or 0.0)


@dataclass
class TimedSink(Sink):
    times: list[float] = field(default_factory=list)

    def token(self, choice: int, token: int, finish: str, logprobs: object = None) -> bool:
        self.times.append(asyncio.get_running_loop().time())
        return super().token(choice, token, finish)
