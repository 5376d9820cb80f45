"""What the figures of two servers mean for the workload they were measured with, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .search import RESOLUTION
from .trial import Limits, Point

Outcome = Literal["wins", "loses", "ties"]

SAME_SHARE = 0.05  # two figures that differ by less are called the same: runs differ as much


@dataclass(frozen=True)
class Measured:
    """One server, its points ordered by rate."""

    name: str
    points: tuple[Point, ...]
    goodput_per_s: float  # the highest rate that passed below every one that did not; 0: none did
    open_ended: bool = False  # time ran out before a rate was found that fails

    def at(self, step: int) -> Point | None:
        return next((point for point in self.points if point.step == step), None)


@dataclass(frozen=True)
class Verdict:
    """`outcome` is the first server's, in goodput. `lowest_throughput_share`: over all rates both were measured at."""

    first: str
    other: str
    outcome: Outcome
    goodput_ratio: float | None  # None: the other has no goodput
    lowest_throughput_share: float | None
    lines: tuple[str, ...]


def judge(first: Measured, other: Measured, workload: str, limits: Limits) -> Verdict:
    """`workload` in words, as in "for chat of 128 → 16 tokens"."""
    mine, theirs = first.goodput_per_s, other.goodput_per_s
    outcome = compare(mine, theirs)
    common = [(point, twin) for point in first.points if (twin := other.at(point.step)) is not None]
    equal = _equal_rate(common)
    share = min((ratio for pair in common if (ratio := _throughput_ratio(*pair)) is not None), default=None)
    limit = f"TTFT <= {limits.ttft_ms:.0f} ms and TPOT <= {limits.tpot_ms:.0f} ms for 90 % of requests"
    lines = [
        f"For {workload}, with {limit}, {_outcome_words(first, other, outcome)}.",
        *_at_equal_rate(first.name, other.name, equal),
    ]
    if share is not None and len(common) > 1:
        lines.append(f"Over the {len(common)} rates both were measured at, {first.name}'s throughput is never below "
                     f"{share:.0%} of {other.name}'s.")  # fmt: skip
    lines += [line for server in (first, other) if (line := _gives_way(server))]
    lines.append(_advice(first.name, other.name, outcome, equal))
    return Verdict(first.name, other.name, outcome, mine / theirs if theirs else None, share, tuple(lines))


def compare(mine: float, theirs: float) -> Outcome:
    """Of two goodputs; one step of the search apart is a tie."""
    if mine > theirs * RESOLUTION * 1.001:
        return "wins"
    if theirs > mine * RESOLUTION * 1.001:
        return "loses"
    return "ties"


def _outcome_words(first: Measured, other: Measured, outcome: Outcome) -> str:
    mine, theirs = first.goodput_per_s, other.goodput_per_s
    if not mine and not theirs:
        return f"neither {first.name} nor {other.name} is in time at any rate that was tried"
    if outcome == "ties":
        words = "is level with"
    elif not mine or not theirs:
        words = "wins over" if outcome == "wins" else "loses to"
    else:
        words = f"wins by {mine / theirs - 1:.0%} over" if outcome == "wins" else f"loses by {1 - mine / theirs:.0%} to"
    return f"{first.name} {words} {other.name}: goodput {_rate(first)} against {_rate(other)} requests/s"


def _rate(server: Measured) -> str:
    if not server.goodput_per_s:
        return "no"
    return f"{'at least ' * server.open_ended}{server.goodput_per_s:.2f}"


def _equal_rate(common: Sequence[tuple[Point, Point]]) -> tuple[Point, Point] | None:
    """The highest rate at which both are in time, else the lowest at which both were measured."""
    both = [pair for pair in common if pair[0].passed and pair[1].passed]
    if both:
        return max(both, key=lambda pair: pair[0].rate_per_s)
    return min(common, key=lambda pair: pair[0].rate_per_s, default=None)


def _throughput_ratio(mine: Point, theirs: Point) -> float | None:
    return mine.output_tokens_per_s / theirs.output_tokens_per_s if theirs.output_tokens_per_s else None


def _word(mine: float, theirs: float, lower_is_better: bool) -> str:
    if not theirs or abs(mine / theirs - 1) < SAME_SHARE:
        return "the same"
    better = (mine < theirs) == lower_is_better
    return f"{'better' if better else 'worse'}, {mine / theirs - 1:+.0%}"


def _latencies(mine: Point, theirs: Point) -> list[tuple[str, float | None, float | None]]:
    return [
        ("TTFT p50", mine.ttft_p50_ms, theirs.ttft_p50_ms),
        ("TTFT p99", mine.ttft_p99_ms, theirs.ttft_p99_ms),
        ("TPOT p50", mine.tpot_p50_ms, theirs.tpot_p50_ms),
        ("TPOT p99", mine.tpot_p99_ms, theirs.tpot_p99_ms),
        ("TBT p99", mine.tbt_p99_ms, theirs.tbt_p99_ms),
    ]


def _at_equal_rate(first: str, other: str, equal: tuple[Point, Point] | None) -> list[str]:
    if equal is None:
        return [f"{first} and {other} were measured at no common rate."]
    mine, theirs = equal
    sustained = "which both sustain" if mine.passed and theirs.passed else "which not both sustain"
    a, b = mine.output_tokens_per_s, theirs.output_tokens_per_s
    lines = [f"At {mine.rate_per_s:.2f} requests/s, {sustained}, {first} has, against {other}:",
             f"  throughput {a:.1f} / {b:.1f} tokens/s ({_word(a, b, lower_is_better=False)})"]  # fmt: skip
    for name, x, y in _latencies(mine, theirs):
        if x is not None and y is not None:
            lines.append(f"  {name} {x:.0f} / {y:.0f} ms ({_word(x, y, lower_is_better=True)})")
    return lines


def _gives_way(server: Measured) -> str:
    """Which limit it breaks first."""
    failing = next((point for point in server.points if not point.passed), None)
    if failing is None:
        return ""
    causes = [
        (failing.late_first, "first tokens are late: it computes prompts too slowly, or they queue"),
        (failing.late_rest, "later tokens are slow: its decode steps are too long, or are held up by prompts"),
        (failing.failed, "requests fail or are refused"),
    ]
    number, cause = max(causes)
    return (
        f"What gives way first in {server.name} is, at {failing.rate_per_s:.2f} requests/s, that {cause} "
        f"({number} of {failing.num_requests})."
    )


def _advice(first: str, other: str, outcome: Outcome, equal: tuple[Point, Point] | None) -> str:
    if outcome == "wins":
        return f"So use {first} for this workload."
    if outcome == "loses":
        return f"So {first} does not pay for this workload: use {other}."
    if equal is None:
        return "So nothing here speaks for either."
    found = [(name, _word(x, y, True)) for name, x, y in _latencies(*equal) if x is not None and y is not None]
    gains, losses = ([name for name, word in found if word.startswith(start)] for start in ("better", "worse"))
    if not gains and not losses:
        return f"So it does not matter which of the two serves this workload; {other} is no worse."
    if not gains:
        return f"So use {other}: at equal rate {first} is worse in {', '.join(losses)}, and better in nothing."
    if not losses:
        return f"So use {first}: at equal rate it is better in {', '.join(gains)}, and worse in nothing."
    return (
        f"So choose by what your readers notice: {first} is better in {', '.join(gains)}, "
        f"and worse in {', '.join(losses)}."
    )
