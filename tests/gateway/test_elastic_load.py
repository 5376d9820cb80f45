"""The elastic split under load, simulated: a real gateway, and workers that take the time real ones would need.

Costs are those of the demo model on one core.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest

from pdserve.decode.speed import EXPECTING_BLOCKS, itl_budget_s
from tests.gateway.harness import System, running_system, until
from tests.gateway.timed_workers import BLOCK_TOKENS, Costs, TimedDecode, TimedPrefill, TimedSink
from tests.gateway.virtual_time import in_virtual_time, now

COSTS = Costs(token_s=0.0016, beside_s=0.002, step_s=0.02, sequence_s=0.0012)
ROOM = {"max_sequences": 64, "num_blocks": 4096}


@dataclass
class Counts:
    choices: Counter[tuple[str, str]] = field(default_factory=Counter)
    ratios: list[float] = field(default_factory=list)

    def count_choice(self, where: str, reason: str) -> None:
        self.choices[where, reason] += 1

    def observe_prediction(self, where: str, predicted_s: float, observed_s: float) -> None:
        self.ratios.append(observed_s / predicted_s)


@dataclass
class Cores:
    """A system of two cores: a prefill and a decode worker, or two decode workers."""

    system: System
    decodes: list[TimedDecode]
    prefill: TimedPrefill | None
    counts: Counts

    async def ask(self, prompt_tokens: int, max_tokens: int) -> list[float]:
        """When its tokens came, on the clock of the loop."""
        sink = TimedSink()
        request, _ = self.system.request(prompt_tokens=prompt_tokens, max_tokens=max_tokens, sink=sink)
        request._chain = []  # all prompts here are the same, but must not count as cached
        await request.run()
        return sink.times

    async def burst(self, count: int, prompt_tokens: int, max_tokens: int) -> tuple[float, float]:
        """So many requests at once: (median TTFT, seconds until all are answered)."""
        began = now()
        answers = await asyncio.gather(*(self.ask(prompt_tokens, max_tokens) for _ in range(count)))
        return statistics.median([times[0] - began for times in answers] or [0.0]), now() - began

    async def rest(self) -> None:
        """Until the gateway has heard that nothing is left."""
        beats = [worker.heartbeat_at for worker in self.system.pool.workers.values()]
        await until(
            lambda: all(w.heartbeat_at > at for w, at in zip(self.system.pool.workers.values(), beats, strict=True))
        )


@asynccontextmanager
async def two_cores(
    directory: Path, *, split: bool, slo_s: float | None = None, costs: Costs = COSTS, local_prefill: str = "auto"
) -> AsyncIterator[Cores]:
    directory.mkdir(exist_ok=True)
    async with running_system(
        directory, max_queue=1000, queue_timeout_s=30.0, clock=now, local_prefill=local_prefill
    ) as system:
        counts = system.dispatcher._counts = Counts()

        def decode(name: str) -> TimedDecode:
            worker = TimedDecode(
                system.context, system.pool.address, name, costs=costs, slo_s=slo_s, **ROOM
            )
            system.start(worker)
            return worker

        decodes, prefill = [decode("d0")], None
        if split:
            prefill = TimedPrefill(
                system.context, system.pool.address, "p0", decodes=list(decodes), costs=costs,
                lent=lambda: decodes[0].idle, **ROOM,
            )  # fmt: skip
            decodes[0].lent = lambda: prefill.idle
            system.start(prefill)
            await system.linked(1)
        else:
            decodes.append(decode("d1"))
            decodes[0].lent, decodes[1].lent = lambda: decodes[1].idle, lambda: decodes[0].idle
        await system.ready(2)
        yield Cores(system, decodes, prefill, counts)
        await system.idle()


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("count", "prompt_tokens", "max_tokens"), [(8, 400, 16), (16, 128, 64)])
@in_virtual_time
async def test_burst_is_shared_and_no_slower_than_on_two_unsplit_cores(
    tmp_path: Path, count: int, prompt_tokens: int, max_tokens: int
) -> None:
    async with two_cores(tmp_path / "split", split=True) as split, two_cores(tmp_path / "both", split=False) as both:
        (ttft_s, all_s), (unsplit_ttft_s, unsplit_s) = await asyncio.gather(
            split.burst(count, prompt_tokens, max_tokens), both.burst(count, prompt_tokens, max_tokens)
        )
        print(f"split {ttft_s:.2f} {all_s:.2f}, unsplit {unsplit_ttft_s:.2f} {unsplit_s:.2f}", split.counts)
        assert unsplit_ttft_s / ttft_s >= 0.95
        assert unsplit_s / all_s >= 0.95
        helped = {reason for where, reason in split.counts.choices if where == "decode"}
        assert helped <= {"idle", "same_burst"}
        assert "idle" in helped


async def streaming(cores: Cores, count: int, max_tokens: int) -> list[asyncio.Task[list[float]]]:
    """Streams that flow by now."""
    tasks = [asyncio.create_task(cores.ask(20, max_tokens)) for _ in range(count)]
    await until(lambda: len(cores.decodes[0].started) == count)
    await until(lambda: cores.system.pool.workers[cores.decodes[0].worker].streams_since() is not None)
    cores.decodes[0].steps.clear()
    cores.counts.choices.clear()
    return tasks


@pytest.mark.timeout(60)
@in_virtual_time
async def test_streams_that_flow_are_not_slowed_by_an_overload_of_prompts(tmp_path: Path) -> None:
    async with two_cores(tmp_path, split=True) as cores:
        background = await streaming(cores, 3, 100)
        await cores.burst(5, 150, 2)
        assert not any(task.done() for task in background), "they flow all the time"
        assert not [step for step in cores.decodes[0].steps if step.prompt_tokens]
        assert {where for where, _ in cores.counts.choices} == {"prefill"}
        assert cores.counts.choices["prefill", "itl_budget"] >= 4
        await asyncio.gather(*background)


@pytest.mark.timeout(60)
@in_virtual_time
async def test_with_an_itl_slo_decode_helps_and_no_step_exceeds_it_by_more_than_a_block(tmp_path: Path) -> None:
    slo_s = 0.07
    async with two_cores(tmp_path, split=True, slo_s=slo_s) as cores:
        background = await streaming(cores, 3, 100)
        await cores.burst(5, 150, 2)
        assert not any(task.done() for task in background), "they flow all the time"
        beside = [step for step in cores.decodes[0].steps if step.running]
        assert max(step.length_s for step in beside) <= slo_s + BLOCK_TOKENS * COSTS.beside_s
        assert cores.counts.choices["decode", "within_slo"] >= 1
        assert sum(step.prompt_tokens for step in beside) >= 150
        await asyncio.gather(*background)


@pytest.mark.timeout(60)
@in_virtual_time
async def test_requests_that_wait_for_a_frozen_prefill_worker_are_computed_by_decode(tmp_path: Path) -> None:
    async with two_cores(tmp_path, split=True) as cores:
        assert cores.prefill is not None
        background = await streaming(cores, 1, 100)
        cores.prefill.frozen = True
        await cores.burst(4, 100, 2)
        assert cores.counts.choices["decode", "no_prefill"] == 4
        await asyncio.gather(*background)
        cores.prefill.kill()


@pytest.mark.timeout(60)
@in_virtual_time
async def test_times_to_first_tokens_are_as_predicted(tmp_path: Path) -> None:
    async with two_cores(tmp_path, split=True) as cores:
        for _ in range(3):
            await cores.burst(2, 200, 2)
        assert {where for where, _ in cores.counts.choices} == {"prefill", "decode"}
        assert len(cores.counts.ratios) >= 3, "as soon as both speeds are known"
        assert 0.6 <= statistics.median(cores.counts.ratios) <= 1.7


DEMO = Costs(token_s=1 / 680, beside_s=0.00125, step_s=0.0235, sequence_s=0.0005)
LEASED = replace(DEMO, two_cores=0.6, sending=1.2)
STREAMS, CALM_FROM_S, OVER_FROM_S, OVER_UNTIL_S = 8, 1.0, 4.0, 16.0


async def overload(cores: Cores) -> tuple[list[float], list[float]]:
    """Scenario d-over of `bench peers`: (when the streams' tokens came, when the long prompts were answered)."""
    tokens: list[float] = []
    answers: list[float] = []

    async def stream() -> None:
        while True:
            tokens.extend(await cores.ask(64, 128))

    async def prompt() -> None:
        answers.append((await cores.ask(1500, 8))[0])

    async def prompts() -> None:
        await asyncio.sleep(OVER_FROM_S)
        while True:
            tasks.append(asyncio.create_task(prompt()))
            await asyncio.sleep(2.0)

    tasks = [asyncio.create_task(stream()) for _ in range(STREAMS)]
    tasks.append(asyncio.create_task(prompts()))
    await asyncio.sleep(OVER_UNTIL_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return tokens, answers


@pytest.mark.timeout(60)
@in_virtual_time
async def test_readers_keep_their_tokens_under_an_overload_of_long_prompts(tmp_path: Path) -> None:
    """What they lose is the second core; their own short prompts hardly wait for the long ones."""
    async with two_cores(tmp_path, split=True, costs=DEMO) as cores:
        began = now()
        tokens, answers = await overload(cores)
        calm = sum(CALM_FROM_S < at - began <= OVER_FROM_S for at in tokens) / (OVER_FROM_S - CALM_FROM_S)
        over = sum(OVER_FROM_S < at - began <= OVER_UNTIL_S for at in tokens) / (OVER_UNTIL_S - OVER_FROM_S)
        print(f"kept {over / calm:.2f}, {len(answers)} long prompts", cores.counts.choices)
        assert over / calm >= 0.8
        assert len(answers) >= 3


@pytest.mark.timeout(60)
@in_virtual_time
async def test_lone_prompts_are_no_slower_than_without_a_split(tmp_path: Path) -> None:
    """Wherever they were computed before: after a burst, decode has been measured without prefill's core."""
    async with (
        two_cores(tmp_path / "split", split=True, costs=LEASED) as split,
        two_cores(tmp_path / "both", split=False, costs=LEASED) as both,
    ):
        for before in (0, 4):
            await split.burst(before, 100, 2)
            await split.rest()
            split.counts.choices.clear()
            for prompt_tokens in (128, 128, 600):
                ttft_s, _ = await split.burst(1, prompt_tokens, 2)
                unsplit_s, _ = await both.burst(1, prompt_tokens, 2)
                await split.rest()
                assert ttft_s <= 1.1 * unsplit_s, f"{prompt_tokens} tokens"
            assert split.counts.choices == {("decode", "idle"): 3}


@pytest.mark.timeout(60)
@in_virtual_time
async def test_streams_that_join_a_lone_prompt_of_decode_come_by_prefill_and_flow(tmp_path: Path) -> None:
    async with two_cores(tmp_path, split=True, costs=LEASED) as cores:
        await cores.burst(1, 600, 2)
        await cores.rest()
        lone = asyncio.create_task(cores.ask(1500, 2))
        await until(lambda: cores.decodes[0].missing)
        began, cores.counts.choices = now(), Counter()
        times = await cores.ask(64, 8)
        assert not lone.done(), "it joined while that was computed"
        assert cores.counts.choices == {("prefill", "faster_there"): 1}
        assert times[0] - began <= 64 * LEASED.token_s * LEASED.sending + 0.1, "it did not wait for decode"
        chunk_s = itl_budget_s(0.0) + EXPECTING_BLOCKS * BLOCK_TOKENS * LEASED.beside_s
        assert max(b - a for a, b in pairwise(times)) <= 2 * chunk_s
        await lone


@pytest.mark.timeout(60)
@in_virtual_time
async def test_never_is_never_even_for_a_lone_prompt(tmp_path: Path) -> None:
    async with two_cores(tmp_path, split=True, costs=LEASED, local_prefill="never") as cores:
        for _ in range(2):
            await cores.burst(1, 200, 2)
            await cores.rest()
        assert cores.counts.choices == {("prefill", "never_local"): 2}
        assert not [step for step in cores.decodes[0].steps if step.prompt_tokens]
