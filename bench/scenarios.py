"""What every server of `bench peers` is put through, with the same prompts.

    a       one stream, 128 → 64 tokens
    b       16 streams at once, 128 → 64
    c       one prompt of 1,024 tokens, one token out
    d-mild  8 streams (64 → 128, each followed by the next) read on while a prompt of 400 tokens arrives every 4 s
    d-over  the same with 1,500 tokens every 2 s, which is more than most machines without a GPU can compute

In d, the streams are first left alone (`calm`); then the long prompts come. At the end everything is cut off, and a gap
that is still open then counts with the length that it has reached: a stream that stands still must show.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Literal

from .client import Client
from .load import Run
from .prompts import PromptMaker
from .record import INTERRUPTED, RequestRecord
from .stats import percentile
from .workload import PlannedRequest, synthetic

SCENARIOS = ("a", "b", "c", "d-mild", "d-over")
NUM_STREAMS = 16
NUM_BACKGROUND = 8
SETTLE_S = 2.0  # the background streams' own prompts are computed, which is not calm yet
PAUSE_S = 1.0  # what was cut off is let go of
LONG_OUTPUT_TOKENS = 8
MAX_LONG_OUTSTANDING = 1024

Figures = dict[str, float]


@dataclass(frozen=True)
class Figure:
    """One column. `key` is `<scenario> <name>`."""

    key: str
    heading: str
    better: Literal["lower", "higher"]
    digits: int = 0

    @property
    def scenario(self) -> str:
        return self.key.partition(" ")[0]

    @property
    def full_name(self) -> str:
        """Where its heading alone would say too little: `b: tpot p99 ms`."""
        scenario, _, name = self.key.partition(" ")
        return f"{scenario}: {name.replace('_', ' ').replace('tok s', 'tok/s')}"


def _disturbed_figures(scenario: str) -> tuple[Figure, ...]:
    return (
        Figure(f"{scenario} calm_itl_p50_ms", "calm ITL p50", "lower"),
        Figure(f"{scenario} calm_itl_p99_ms", "p99", "lower"),
        Figure(f"{scenario} itl_p50_ms", "disturbed ITL p50", "lower"),
        Figure(f"{scenario} itl_p99_ms", "p99", "lower"),
        Figure(f"{scenario} itl_max_ms", "max", "lower"),
        Figure(f"{scenario} calm_tok_s", "calm tok/s", "higher", 1),
        Figure(f"{scenario} tok_s", "disturbed tok/s", "higher", 1),
        Figure(f"{scenario} kept", "kept", "higher", 2),
        Figure(f"{scenario} long_ttft_ms", "long TTFT p50", "lower"),
        Figure(f"{scenario} long_answered", "of them answered", "higher", 2),
    )


FIGURES = (
    Figure("a ttft_ms", "a: TTFT ms", "lower"),
    Figure("a tpot_ms", "TPOT ms", "lower", 1),
    Figure("b tok_s", "b: tok/s", "higher", 1),
    Figure("b ttft_p50_ms", "TTFT p50 ms", "lower"),
    Figure("b tpot_p50_ms", "TPOT p50 ms", "lower", 1),
    Figure("b tpot_p99_ms", "p99", "lower", 1),
    Figure("c ttft_ms", "c: TTFT ms", "lower"),
    Figure("c prompt_tok_s", "prompt tok/s", "higher"),
    *_disturbed_figures("d-mild"),
    *_disturbed_figures("d-over"),
)


class ScenarioFailed(Exception):
    """A server that did not do what the scenario asks for; the text is its answer."""


@dataclass(frozen=True)
class Disturbance:
    """Long prompts: how long, and how far apart; and for how long the streams are watched."""

    input_tokens: int
    every_s: float
    calm_s: float
    disturbed_s: float


class Course:
    """All scenarios for one server. `seed` is the same for every server, so that the prompts are."""

    def __init__(self, client: Client, maker: PromptMaker, *, reps: int, calm_s: float, disturbed_s: float) -> None:
        self._client = client
        self._maker = maker
        self._reps = reps
        self._disturbances = {
            "d-mild": Disturbance(400, 4.0, calm_s, disturbed_s),
            "d-over": Disturbance(1500, 2.0, calm_s, disturbed_s),
        }

    async def warm_up(self) -> None:
        """A short request, and as many at once as scenario b has, so that nothing is done for the first time later."""
        await self._at_once("warmup/alone", 1, 32, 8)
        await self._at_once("warmup/many", NUM_STREAMS, 32, 8)

    async def run(self, scenario: str) -> Figures:
        """Its figures, medians over the repetitions. Raises ScenarioFailed."""
        if scenario in self._disturbances:
            found = await self._disturbed(scenario, self._disturbances[scenario])
            await asyncio.sleep(PAUSE_S)
        else:
            once = {"a": self._a, "b": self._b, "c": self._c}[scenario]
            reps = [await once(f"{scenario}/{rep}") for rep in range(self._reps)]
            found = {key: statistics.median(one[key] for one in reps) for key in reps[0]}
        return {f"{scenario} {key}": value for key, value in found.items()}

    def _plan(self, stream: str, input_tokens: int, output_tokens: int) -> Iterator[PlannedRequest]:
        return synthetic(
            self._maker, stream, input_tokens=input_tokens, output_tokens=output_tokens, prefix_tokens=0, times=None
        )

    async def _at_once(self, stream: str, number: int, input_tokens: int, output_tokens: int) -> list[RequestRecord]:
        run = Run(self._client)
        await run.closed_loop(islice(self._plan(stream, input_tokens, output_tokens), number), concurrency=number)
        if failed := [record for record in run.records if not record.ok]:
            raise ScenarioFailed(f"{failed[0].error}: {failed[0].detail}")
        return run.records

    async def _a(self, stream: str) -> Figures:
        (record,) = await self._at_once(stream, 1, 128, 64)
        return {"ttft_ms": _ms(record.ttft_s), "tpot_ms": _ms(record.tpot_s)}

    async def _b(self, stream: str) -> Figures:
        records = await self._at_once(stream, NUM_STREAMS, 128, 64)
        took_s = max(record.ended_s for record in records) - min(record.sent_s for record in records)
        tpot_ms = sorted(_ms(record.tpot_s) for record in records)
        return {
            "tok_s": sum(record.output_tokens for record in records) / took_s,
            "ttft_p50_ms": statistics.median(_ms(record.ttft_s) for record in records),
            "tpot_p50_ms": percentile(tpot_ms, 50),
            "tpot_p99_ms": percentile(tpot_ms, 99),
        }

    async def _c(self, stream: str) -> Figures:
        (record,) = await self._at_once(stream, 1, 1024, 1)
        ttft_ms = _ms(record.ttft_s)
        return {"ttft_ms": ttft_ms, "prompt_tok_s": record.prompt_tokens / ttft_ms * 1000}

    async def _disturbed(self, scenario: str, disturbance: Disturbance) -> Figures:
        background, long = Run(self._client), Run(self._client)
        calm_until_s = SETTLE_S + disturbance.calm_s
        whole_s = calm_until_s + disturbance.disturbed_s
        prompts = self._plan(f"{scenario}/long", disturbance.input_tokens, LONG_OUTPUT_TOKENS)
        times = (calm_until_s + i * disturbance.every_s for i in count())
        arrivals = [
            PlannedRequest(planned.index, at_s, planned.prompt, planned.output_tokens)
            for planned, at_s in zip(
                islice(prompts, int(disturbance.disturbed_s / disturbance.every_s)), times, strict=False
            )
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(whole_s), asyncio.TaskGroup() as group:
                streams = self._plan(f"{scenario}/background", 64, 128)
                group.create_task(background.closed_loop(streams, concurrency=NUM_BACKGROUND))
                group.create_task(long.open_loop(iter(arrivals), max_outstanding=MAX_LONG_OUTSTANDING))
        at_s = background.started_s
        return disturbed_figures(background.records, long.records, at_s + SETTLE_S, at_s + calm_until_s, at_s + whole_s)


def disturbed_figures(
    background: Sequence[RequestRecord], long: Sequence[RequestRecord], calm_from_s: float, calm_until_s: float,
    ended_s: float,
) -> Figures:  # fmt: skip
    """The figures of one run of scenario d. Raises ScenarioFailed when a stream failed, or nothing streamed."""
    if failed := [record for record in (*background, *long) if record.error not in ("", INTERRUPTED)]:
        raise ScenarioFailed(f"{len(failed)} requests failed, one with {failed[0].error}: {failed[0].detail}")
    calm_ms = gaps_ms(background, calm_from_s, calm_until_s)
    hot_ms = sorted(gaps_ms(background, calm_until_s, ended_s) + open_gaps_ms(background, ended_s))
    if not calm_ms or not hot_ms:
        raise ScenarioFailed("the background streams brought no tokens")
    calm_tok_s = _tokens(background, calm_from_s, calm_until_s) / (calm_until_s - calm_from_s)
    tok_s = _tokens(background, calm_until_s, ended_s) / (ended_s - calm_until_s)
    figures = {
        "calm_itl_p50_ms": percentile(calm_ms, 50),
        "calm_itl_p99_ms": percentile(calm_ms, 99),
        "itl_p50_ms": percentile(hot_ms, 50),
        "itl_p99_ms": percentile(hot_ms, 99),
        "itl_max_ms": hot_ms[-1],
        "calm_tok_s": calm_tok_s,
        "tok_s": tok_s,
        "kept": tok_s / calm_tok_s,
    }
    if long:
        answered = [_ms(record.ttft_s) for record in long if record.token_times_s]
        figures["long_answered"] = len(answered) / len(long)
        if answered:
            figures["long_ttft_ms"] = statistics.median(answered)
    return figures


def gaps_ms(records: Sequence[RequestRecord], after_s: float, until_s: float) -> list[float]:
    """The gaps between tokens that ended in that time, sorted."""
    pairs = (pair for record in records for pair in pairwise(record.token_times_s))
    return sorted((b - a) * 1000 for a, b in pairs if after_s < b <= until_s)


def open_gaps_ms(records: Sequence[RequestRecord], ended_s: float) -> list[float]:
    """How long streams that were cut off had been waiting for their next token."""
    cut = [record.token_times_s for record in records if record.error == INTERRUPTED and record.token_times_s]
    return [max(0.0, ended_s - times[-1]) * 1000 for times in cut]


def _tokens(records: Sequence[RequestRecord], after_s: float, until_s: float) -> int:
    return sum(after_s < at_s <= until_s for record in records for at_s in record.token_times_s)


def _ms(seconds: float | None) -> float:
    if seconds is None:
        raise ScenarioFailed("an answer without tokens")
    return seconds * 1000


def ratio(figure: Figure, mine: Mapping[str, float], theirs: Sequence[Mapping[str, float]]) -> float | None:
    """`mine` as a multiple of the best of `theirs`; None where either has no such figure."""
    values = [other[figure.key] for other in theirs if figure.key in other]
    if figure.key not in mine or not values:
        return None
    best = min(values) if figure.better == "lower" else max(values)
    return mine[figure.key] / best if best else None
