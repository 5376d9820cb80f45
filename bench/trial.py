"""One open loop at one rate, and what of it counts for goodput."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from .client import Client
from .load import Run
from .prompts import PromptMaker
from .record import RequestRecord
from .stats import percentile
from .traces import TraceRequest
from .workload import PlannedRequest, arrival_times, clip_lengths

Timing = Literal["poisson", "trace"]

GOOD_SHARE = 0.9  # of the requests, within both limits: DistServe's definition
LONGEST_SHARE = 0.1  # of a request's gaps: Mooncake's TBT is their mean
MAX_OUTSTANDING = 4096


@dataclass(frozen=True)
class Limits:
    """A request is in time when both hold."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Workload:
    """The requests of every trial: the same lengths at each rate. `at_s` of each is the trace's."""

    what: str  # in words
    requests: Sequence[TraceRequest]
    block_tokens: int  # that a hash id stands for
    timing: Timing

    def times(self, rate_per_s: float, seed: int) -> list[float]:
        """When each is due: at random, or as in the trace, but at that rate on average."""
        number = len(self.requests)
        if self.timing == "poisson":
            return list(islice(arrival_times(rate_per_s, "poisson", seed), number))
        first_s, last_s = self.requests[0].at_s, self.requests[-1].at_s
        scale = (number - 1) / rate_per_s / (last_s - first_s) if last_s > first_s else 0.0
        return [(request.at_s - first_s) * scale for request in self.requests]

    def plan(
        self, maker: PromptMaker, stream: str, times: Sequence[float | None], context_tokens: int | None
    ) -> list[PlannedRequest]:
        """Prompts are made anew for every `stream`: no trial meets the prompts of another in a cache."""
        own = PromptMaker(maker.pieces, random.Random(f"{maker.seed}/{stream}").getrandbits(31))
        planned = []
        for index, (request, at_s) in enumerate(zip(self.requests, times, strict=True)):
            input_tokens, output_tokens = clip_lengths(request.input_tokens, request.output_tokens, context_tokens)
            prompt = own.from_blocks(f"{index}", input_tokens, request.hash_ids, self.block_tokens)
            planned.append(PlannedRequest(index, at_s, prompt, output_tokens))
        return planned


@dataclass(frozen=True)
class Point:
    """What one rate brought. Latencies are over the requests that succeeded, TTFT from when each was due."""

    step: int
    rate_per_s: float
    num_requests: int
    good_share: float
    late_first: int  # beyond the limit of TTFT
    late_rest: int  # beyond that of TPOT
    failed: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    tbt_p50_ms: float | None  # over requests, of the mean of the longest tenth of gaps
    tbt_p99_ms: float | None

    @property
    def passed(self) -> bool:
        return self.good_share >= GOOD_SHARE


def tbt_s(record: RequestRecord) -> float | None:
    """Mooncake's TBT of one request: the mean of the longest tenth of its gaps, of one at least."""
    gaps = sorted(record.itl_s, reverse=True)
    longest = gaps[: max(1, int(len(gaps) * LONGEST_SHARE))]
    return sum(longest) / len(longest) if longest else None


def point_of(step: int, rate_per_s: float, records: Sequence[RequestRecord], limits: Limits) -> Point:
    done = [record for record in records if record.ok and record.token_times_s]
    took_s = max(record.ended_s for record in records) - min(record.due_s for record in records)
    ttft_ms = sorted((record.token_times_s[0] - record.due_s) * 1000 for record in done)
    tpot_ms = sorted(record.tpot_s * 1000 for record in done if record.tpot_s is not None)
    tbt_ms = sorted(seconds * 1000 for record in done if (seconds := tbt_s(record)) is not None)

    def at(values: list[float], percent: float) -> float | None:
        return percentile(values, percent) if values else None

    return Point(
        step=step,
        rate_per_s=rate_per_s,
        num_requests=len(records),
        good_share=sum(record.meets(limits.ttft_ms, limits.tpot_ms) for record in records) / len(records),
        late_first=sum(value > limits.ttft_ms for value in ttft_ms),
        late_rest=sum(value > limits.tpot_ms for value in tpot_ms),
        failed=len(records) - len(done),
        requests_per_s=len(done) / took_s,
        output_tokens_per_s=sum(record.output_tokens for record in done) / took_s,
        ttft_p50_ms=at(ttft_ms, 50),
        ttft_p99_ms=at(ttft_ms, 99),
        tpot_p50_ms=at(tpot_ms, 50),
        tpot_p99_ms=at(tpot_ms, 99),
        tbt_p50_ms=at(tbt_ms, 50),
        tbt_p99_ms=at(tbt_ms, 99),
    )


async def run_trial(
    client: Client, workload: Workload, maker: PromptMaker, step: int, rate_per_s: float, limits: Limits,
    context_tokens: int | None,
) -> Point:  # fmt: skip
    """Send every request of the workload at its time, and wait for all answers."""
    times = workload.times(rate_per_s, maker.seed)
    plan = workload.plan(maker, f"step/{step}", times, context_tokens)
    run = Run(client)
    await run.open_loop(iter(plan), max_outstanding=MAX_OUTSTANDING)
    return point_of(step, rate_per_s, run.records, limits)


async def run_alone(
    client: Client, workload: Workload, maker: PromptMaker, stream: str, number: int, context_tokens: int | None
) -> list[RequestRecord]:
    """Some requests of the workload one after another: what an idle server needs for them.

    Of all lengths of prompts, evenly, so that their medians are the workload's.
    """
    plan = workload.plan(maker, stream, [None] * len(workload.requests), context_tokens)
    run = Run(client)
    await run.closed_loop(iter(evenly(sorted(plan, key=lambda planned: len(planned.prompt)), number)), concurrency=1)
    return run.records


def evenly(items: Sequence[PlannedRequest], number: int) -> list[PlannedRequest]:
    """That many of them (all, if there are fewer), the first and the last among them."""
    number = min(number, len(items))
    return [items[round(i * (len(items) - 1) / max(number - 1, 1))] for i in range(number)]
