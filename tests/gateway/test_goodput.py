"""Overload in small: a real gateway without its HTTP side, and workers that take their time but compute nothing.

Prefill computes one prompt after another; a decode step costs a fixed time and some for each sequence in it.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.dispatch import Objectives
from pdserve.transfer.messages import Message, Prefill
from tests.gateway.fake_worker import FakeDecode, FakePrefill, FakeWorker
from tests.gateway.harness import Sink, System, running_system

PREFILL_TOKENS_PER_S = 1000.0
STEP_S, SEQUENCE_STEP_S = 0.02, 0.002
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 16
TTFT_SLO_S, TPOT_SLO_S = 0.6, 0.08
RATE_PER_S = 6.0  # sustainable: prefill can do 10
DURATION_S = 5.0


@dataclass(eq=False)
class TimedDecode(FakeDecode):
    next_step_s: float = 0.0

    def step(self) -> None:
        now = time.monotonic()
        if not self.started:
            self.next_step_s = 0.0
        elif self.next_step_s == 0.0:
            self.next_step_s = now + self._step_s()
        elif now >= self.next_step_s:
            super().step()
            self.next_step_s = now + self._step_s()

    def _step_s(self) -> float:
        return STEP_S + SEQUENCE_STEP_S * len(self.started)


@dataclass(eq=False)
class TimedPrefill(FakePrefill):
    waiting: list[Prefill] = field(default_factory=list)
    done_s: float = 0.0

    def handle(self, message: Message) -> None:
        if isinstance(message, Prefill):
            self.live.add((message.request, message.attempt))
            self.waiting.append(message)
            if len(self.waiting) == 1:
                self._begin()
            return
        FakeWorker.handle(self, message)
        self.waiting = [m for m in self.waiting if (m.request, m.attempt) in self.live]

    def _begin(self) -> None:
        self.done_s = time.monotonic() + len(self.waiting[0].prompt) / PREFILL_TOKENS_PER_S

    def step(self) -> None:
        if self.waiting and time.monotonic() >= self.done_s:
            FakePrefill.handle(self, self.waiting.pop(0))
            if self.waiting:
                self._begin()


@dataclass
class TimedSink(Sink):
    times: list[float] = field(default_factory=list)

    def token(self, choice: int, token: int, finish: str, logprobs: object = None) -> bool:
        self.times.append(time.monotonic())
        return super().token(choice, token, finish)


async def is_good(system: System) -> bool:
    """One request: did it get its tokens in time? Nobody waits longer than that."""
    sink, began = TimedSink(), time.monotonic()
    request, _ = system.request(prompt_tokens=PROMPT_TOKENS, max_tokens=OUTPUT_TOKENS, sink=sink)
    request._chain = []  # all prompts here are the same, but must not count as cached
    try:
        async with asyncio.timeout(TTFT_SLO_S + OUTPUT_TOKENS * TPOT_SLO_S):
            await request.run()
    except (ApiError, TimeoutError):
        return False
    tpot_s = (sink.times[-1] - sink.times[0]) / (len(sink.times) - 1)
    return sink.times[0] - began <= TTFT_SLO_S and tpot_s <= TPOT_SLO_S


async def goodput(system: System, rate_per_s: float) -> float:
    """Requests answered in time per second, of those that come at random at this rate."""
    rng, began, at_s = random.Random(f"{rate_per_s}"), time.monotonic(), 0.0
    tasks = []
    while (at_s := at_s + rng.expovariate(rate_per_s)) < DURATION_S:
        await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
        tasks.append(asyncio.create_task(is_good(system)))
    return sum(await asyncio.gather(*tasks)) / DURATION_S


@pytest.mark.timeout(60)
async def test_three_times_the_sustainable_rate_leaves_goodput_at_no_less_than_80_percent(tmp_path: Path) -> None:
    objectives = Objectives(TTFT_SLO_S, TPOT_SLO_S)
    async with running_system(tmp_path, local_prefill="never", objectives=objectives, max_queue=1000) as system:
        decode = TimedDecode(system.context, system.pool.address, "d0", max_sequences=64, num_blocks=4096)
        system.start(decode)
        prefill = TimedPrefill(system.context, system.pool.address, "p0", decodes=[decode], max_sequences=64)
        system.start(prefill)
        await system.linked(1)
        once = await goodput(system, RATE_PER_S)
        assert once > 0.6 * RATE_PER_S, "this much is sustainable"
        assert await goodput(system, 3 * RATE_PER_S) >= 0.8 * once
        await system.idle()
