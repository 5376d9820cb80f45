"""What will be sent, and when: requests drawn from a seed, or replayed from a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal

from .prompts import PromptMaker
from .traces import TraceRequest

Arrival = Literal["poisson", "uniform"]


@dataclass(frozen=True)
class PlannedRequest:
    """One request to send. `at_s` is when, since the start of the run; None in a closed loop."""

    index: int
    at_s: float | None
    prompt: list[int]
    output_tokens: int


def arrival_times(rate_per_s: float, arrival: Arrival, seed: int) -> Iterator[float]:
    """Endless arrival times in seconds, starting near 0: `poisson` has exponential gaps, `uniform` equal ones."""
    if arrival == "uniform":
        yield from (index / rate_per_s for index in count())
        return
    gaps = random.Random(f"{seed}/arrivals")
    at_s = 0.0
    while True:
        at_s += gaps.expovariate(rate_per_s)
        yield at_s


def synthetic(
    maker: PromptMaker,
    stream: str,
    *,
    input_tokens: int,
    output_tokens: int,
    prefix_tokens: int,
    times: Iterator[float] | None,
) -> Iterator[PlannedRequest]:
    """Endless requests of one shape. `stream` names them, so that warm-up prompts differ from measured ones."""
    for index in count():
        prompt = maker.with_prefix(f"{stream}/{index}", input_tokens, prefix_tokens)
        yield PlannedRequest(index, None if times is None else next(times), prompt, output_tokens)


@dataclass
class TraceFit:
    """A trace made to fit: cut to what will be replayed, scaled in time, clipped to the model's context."""

    requests: list[TraceRequest]
    num_clipped: int  # longer than the context, cut
    num_raised: int  # a length of 0, made 1
    num_odd_blocks: int  # hash_ids that do not match the length at this block size


def fit_trace(
    requests: list[TraceRequest],
    *,
    speed: float,
    block_tokens: int,
    context_tokens: int | None,
    num_requests: int | None,
    duration_s: float | None,
) -> TraceFit:
    """Scale time by 1/speed, keep the first `num_requests` due within `duration_s`, and bound the lengths."""
    fit = TraceFit([], 0, 0, 0)
    for request in islice(requests, num_requests):
        at_s = request.at_s / speed
        if duration_s is not None and at_s > duration_s:
            break
        wanted = max(request.input_tokens, 1), max(request.output_tokens, 1)
        kept = clip_lengths(*wanted, context_tokens)
        fit.num_raised += wanted != (request.input_tokens, request.output_tokens)
        fit.num_clipped += kept != wanted
        if request.hash_ids and len(request.hash_ids) != -(-request.input_tokens // block_tokens):
            fit.num_odd_blocks += 1
        fit.requests.append(TraceRequest(at_s, *kept, request.hash_ids))
    return fit


def clip_lengths(input_tokens: int, output_tokens: int, context_tokens: int | None) -> tuple[int, int]:
    """Lengths that fit a context together: the output keeps up to half of it, or what a short prompt leaves."""
    if context_tokens is None or input_tokens + output_tokens <= context_tokens:
        return input_tokens, output_tokens
    output = min(output_tokens, max(context_tokens - input_tokens, context_tokens // 2, 1))
    return max(context_tokens - output, 1), output


def replay(maker: PromptMaker, requests: list[TraceRequest], block_tokens: int) -> Iterator[PlannedRequest]:
    """The requests of a fitted trace, with prompts."""
    for index, request in enumerate(requests):
        prompt = maker.from_blocks(f"trace/{index}", request.input_tokens, request.hash_ids, block_tokens)
        yield PlannedRequest(index, request.at_s, prompt, request.output_tokens)
