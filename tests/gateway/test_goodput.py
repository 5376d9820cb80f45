"""Overload in small: a real gateway without its HTTP side, and workers that take their time but compute nothing."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.dispatch import Objectives
from tests.gateway.harness import System, running_system
from tests.gateway.timed_workers import TimedDecode, TimedPrefill, TimedSink
from tests.gateway.virtual_time import in_virtual_time, now

PROMPT_TOKENS, OUTPUT_TOKENS = 100, 16
TTFT_SLO_S, TPOT_SLO_S = 0.6, 0.08
RATE_PER_S = 6.0  # sustainable: prefill can do 10
DURATION_S = 5.0


async def is_good(system: System) -> bool:
    """One request: did it get its tokens in time? Nobody waits longer than that."""
    sink, began = TimedSink(), now()
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
    rng, began, at_s = random.Random(f"{rate_per_s}"), now(), 0.0
    tasks = []
    while (at_s := at_s + rng.expovariate(rate_per_s)) < DURATION_S:
        await asyncio.sleep(max(0.0, began + at_s - now()))
        tasks.append(asyncio.create_task(is_good(system)))
    return sum(await asyncio.gather(*tasks)) / DURATION_S


@pytest.mark.timeout(60)
@in_virtual_time
async def test_three_times_the_sustainable_rate_leaves_goodput_at_no_less_than_80_percent(tmp_path: Path) -> None:
    objectives = Objectives(TTFT_SLO_S, TPOT_SLO_S)
    options = {"local_prefill": "never", "objectives": objectives, "max_queue": 1000, "clock": now}
    async with running_system(tmp_path, **options) as system:
        decode = TimedDecode(system.context, system.pool.address, "d0", max_sequences=64, num_blocks=4096)
        system.start(decode)
        prefill = TimedPrefill(system.context, system.pool.address, "p0", decodes=[decode], max_sequences=64)
        system.start(prefill)
        await system.linked(1)
        once = await goodput(system, RATE_PER_S)
        assert once > 0.6 * RATE_PER_S, "this much is sustainable"
        assert await goodput(system, 3 * RATE_PER_S) >= 0.8 * once
        await system.idle()
