"""Right, honestly refused, wrong, or hung: the verdict over every answer, against the log of what was done when."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from tests.system.faults.load import Answer, ChoiceAnswer

AFTERMATH_S = 8.0  # how long a fault may be the cause of an error after it is over
TRANSFER_WORDS = (
    "bad_checksum", "gap", "incomplete", "overrun", "bad_size", "bad_layer", "bad_handoff", "transfer_deadline",
    "prefill_aborted", "link_lost", "no_link", "gone", "does not know the attempt", "unknown",
)  # fmt: skip


class Verdict(Enum):
    EXACT = "exact"
    ERROR = "honest error"
    UNTRUE = "error without a true cause"
    WRONG = "wrong"
    BROKEN = "connection broken"
    HUNG = "hung"


@dataclass
class Fault:
    """One thing that was done to the system. `inflight`: attempts placed on the struck process at that moment."""

    kind: str
    process: str
    inflight: int
    began_at: float
    ended_at: float = float("inf")
    detail: str = ""

    @property
    def on_link(self) -> bool:
        return self.kind.startswith("link ")


@dataclass
class Judge:
    """Collects answers; `violations` holds, in words, everything that must not be."""

    faults: list[Fault] = field(default_factory=list)
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # honest ones, by code
    violations: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    gateway_may_break: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_answers(self) -> int:
        return sum(self.verdicts.values())

    def add(self, answer: Answer) -> None:
        verdict, why = self._judge(answer)
        with self._lock:
            self.verdicts[verdict] += 1
            self.slowest_s = max(self.slowest_s, answer.ended_at - answer.started_at)
            if verdict is Verdict.ERROR:
                self.errors[why] += 1
            elif verdict is not Verdict.EXACT:
                how = "streamed" if answer.stream else "whole"
                self.violations.append(f"{verdict.value}: {answer.case.name} ({how}): {why}")

    def violation(self, text: str) -> None:
        with self._lock:
            self.violations.append(text)

    def _judge(self, answer: Answer) -> tuple[Verdict, str]:
        if wrong := differences(answer):
            return Verdict.WRONG, wrong
        if answer.hung:
            return Verdict.HUNG, f"no end within {answer.ended_at - answer.started_at:.0f} s"
        if answer.broken:
            return Verdict.BROKEN, answer.broken
        if answer.complete:
            return Verdict.EXACT, ""
        error = answer.error
        if error is None:
            return Verdict.BROKEN, "it ended without text and without an error"
        code, message = str(error.get("code")), str(error.get("message"))
        if code not in ("no_worker", "queue_timeout", "worker_failed", "poison"):
            return Verdict.UNTRUE, f"{answer.status} {code}: {message}"
        if answer.status == 503 and not answer.retry_after:
            return Verdict.UNTRUE, f"503 without Retry-After: {message}"
        if not self._explains(answer, code, message):
            return Verdict.UNTRUE, f"nothing was done that explains {code!r}: {message}"
        return Verdict.ERROR, code

    def _explains(self, answer: Answer, code: str, message: str) -> bool:
        """Was there a fault, during the request or shortly before, which the message can mean?"""
        recent = [f for f in list(self.faults) if f.ended_at + AFTERMATH_S > answer.started_at]
        if code in ("no_worker", "queue_timeout"):
            return any(not fault.on_link or fault.kind == "link silence" for fault in recent)
        named = set(re.findall(r"\b(?:prefill|decode)-\d+\b", message))
        if any(fault.process in named for fault in recent):
            return True
        return any(word in message for word in TRANSFER_WORDS) and bool(recent)


def differences(answer: Answer) -> str:
    """What of the answer is not golden; of one that was cut short, what is not the beginning of it."""
    golden = answer.case.golden
    if answer.complete:
        got = tuple(choice for _, choice in sorted(answer.choices.items()))
        if got != golden:
            return _first_difference(got, golden)
        if answer.usage != answer.case.golden_usage:
            return f"usage {answer.usage}, not {answer.case.golden_usage}"
        return ""
    for index, choice in answer.choices.items():
        right = golden[index]
        if choice.token_ids != right.token_ids[: len(choice.token_ids)] or not right.text.startswith(choice.text):
            return "before it failed, " + _first_difference((choice,), (right,))
    return ""


def _first_difference(got: tuple[ChoiceAnswer, ...], golden: tuple[ChoiceAnswer, ...]) -> str:
    if len(got) != len(golden):
        return f"{len(got)} choices, not {len(golden)}"
    for number, (ours, right) in enumerate(zip(got, golden, strict=True)):
        pairs = zip(ours.token_ids, right.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours.token_ids), len(right.token_ids)))
        if ours != right:
            return (
                f"choice {number} parts at token {at} of {len(ours.token_ids)} ({len(right.token_ids)} expected): "
                f"{ours.token_ids[max(at - 2, 0) : at + 4]} for {right.token_ids[max(at - 2, 0) : at + 4]}, "
                f"{ours.finish_reason!r} for {right.finish_reason!r}"
            )
    return ""
