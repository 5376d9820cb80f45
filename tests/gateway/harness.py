"""What the gateway's tests have in common: a pool, a dispatcher and fake workers on one ipc address."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from pdserve.engine.lifetime import Lifetime
from pdserve.gateway.dispatch import Dispatcher, Objectives
from pdserve.gateway.limits import AdmissionQueue
from pdserve.gateway.membership import ModelIdentity
from pdserve.gateway.pool import Pool
from pdserve.gateway.request import Job, Request
from pdserve.gateway.router import POLICIES
from pdserve.gateway.serving import pairs
from pdserve.transfer.messages import GatewayHeartbeat, TokenLogprobs
from pdserve.transfer.sampling_params import SamplingParams
from tests.gateway.fake_worker import FINGERPRINT, MODEL, FakeDecode, FakePrefill, FakeWorker, token_at

SETTLE_TURNS = 40
NO_OBJECTIVES = Objectives()
IDENTITY = ModelIdentity(MODEL, "/models/m", FINGERPRINT)


@dataclass
class Sink:
    """Keeps what it is given. `stop_at` (choice → token count) plays a stop string."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    stop_at: dict[int, int] = field(default_factory=dict)
    prompts: list[tuple[int, list[float]]] = field(default_factory=list)  # (first choice, log probabilities)
    logprobs: dict[int, list[object]] = field(default_factory=dict)

    def prompt_logprobs(self, first_choice: int, entries: Sequence[TokenLogprobs]) -> None:
        assert not self.tokens, "a prompt's own tokens come first"
        self.prompts.append((first_choice, [entry.logprob for entry in entries]))

    def token(self, choice: int, token: int, finish: str, logprobs: object = None) -> bool:
        assert choice not in self.finishes, "nothing may follow the end of a choice"
        self.logprobs.setdefault(choice, []).append(logprobs)
        mine = self.tokens.setdefault(choice, [])
        mine.append(token)
        if finish:
            self.finishes[choice] = finish
        return len(mine) == self.stop_at.get(choice)

    def late_finish(self, choice: int, finish: str) -> None:
        self.finishes[choice] = finish


@dataclass
class System:
    """One gateway without its HTTP side, and the workers that a test adds."""

    context: zmq.Context[Any]
    pool: Pool
    dispatcher: Dispatcher
    retries: list[str] = field(default_factory=list)
    workers: list[FakeWorker] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def count_retry(self, kind: str) -> None:
        self.retries.append(kind)

    def start(self, worker: FakeWorker) -> None:
        self.workers.append(worker)
        self.tasks.append(asyncio.create_task(worker.run()))

    def decode(self, name: str = "d0", **options: Any) -> FakeDecode:
        worker = FakeDecode(self.context, options.pop("address", self.pool.address), name, **options)
        self.start(worker)
        for prefill in self.workers:
            if isinstance(prefill, FakePrefill):
                prefill.decodes.append(worker)
        return worker

    def prefill(self, name: str = "p0", **options: Any) -> FakePrefill:
        decodes = [w for w in self.workers if isinstance(w, FakeDecode)]
        address = options.pop("address", self.pool.address)
        worker = FakePrefill(self.context, address, name, decodes=decodes, **options)
        self.start(worker)
        return worker

    async def pair(self) -> tuple[FakeDecode, FakePrefill]:
        """One of each, linked and ready."""
        decode = self.decode()
        prefill = self.prefill()
        await self.linked(1)
        return decode, prefill

    async def linked(self, count: int, model: str = MODEL) -> None:
        await until(lambda: len(pairs(self.pool.of(model), alone=False)) == count)

    async def ready(self, count: int) -> None:
        await until(lambda: sum(w.ready for w in self.pool.workers.values()) == count)

    def request(
        self, *, prompt_tokens: int = 40, max_tokens: int = 10, n: int = 1, sink: Sink | None = None,
        eos: frozenset[int] = frozenset({0}), priority: int = 0, client: str = "",
        logprobs: int | None = None, prompt_logprobs: int | None = None,
    ) -> tuple[Request, Sink]:  # fmt: skip
        sink = sink or Sink()
        params = SamplingParams(max_tokens, seed=1, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        job = Job(list(range(1, prompt_tokens + 1)), n, params, priority=priority, client=client)
        return Request(job, self.dispatcher, sink, Lifetime(), self, eos), sink

    @property
    def num_legs(self) -> int:
        return sum(len(w.legs) for w in self.pool.workers.values())

    async def settled(self) -> None:
        """Whatever would be sent has been sent and has arrived: for many turns of every loop nothing is new."""

        def seen() -> tuple[int, ...]:
            heard = (sum(not isinstance(m, GatewayHeartbeat) for m in worker.received) for worker in self.workers)
            return self.num_legs, len(self.dispatcher.queue), *heard

        same, before = 0, seen()
        async with asyncio.timeout(20.0):
            while same < SETTLE_TURNS:
                await asyncio.sleep(0.005)
                same, before = (same + 1 if seen() == before else 0), seen()

    async def idle(self) -> None:
        """Nothing is placed anywhere, and every worker that still runs knows it."""
        await until(lambda: self.num_legs == 0 and not any(w.live for w in self.workers if not w.killed))


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait for a condition of another task's making; fails the test when it does not come true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def expected(prompt_tokens: int, count: int) -> list[int]:
    return [token_at(prompt_tokens + i) for i in range(count)]


@contextlib.asynccontextmanager
async def running_system(
    directory: Path, *, max_queue: int = 100, queue_timeout_s: float = 30.0, local_prefill: str = "auto",
    death_bound_s: float = 1.0, policy: str = "prefix_aware", address: str = "",
    objectives: Objectives = NO_OBJECTIVES, models: Sequence[ModelIdentity] = (IDENTITY,),
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[System]:  # fmt: skip
    with zmq_context() as context:
        pool = Pool(context, address or f"ipc://{directory}/gw", "gateway#00000000", models, death_bound_s, clock)
        dispatcher = Dispatcher(
            pool, MODEL, AdmissionQueue(max_queue, clock), POLICIES[policy], local_prefill, queue_timeout_s, clock,
            objectives,
        )  # fmt: skip
        system = System(context, pool, dispatcher)
        beating = pool.start()
        try:
            yield system
        finally:
            for worker in system.workers:
                if not worker.killed:
                    worker.kill()
            await asyncio.gather(*system.tasks)
            await pool.close()
            beating.result()


@contextlib.contextmanager
def zmq_context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)
