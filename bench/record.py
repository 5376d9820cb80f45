"""What one request did: its times on one monotonic clock, and the latencies between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Clock = Callable[[], float]
monotonic: Clock = time.monotonic

INTERRUPTED = "interrupted"
NOT_SENT = "not_sent"


@dataclass
class RequestRecord:
    """All times in seconds of the monotonic clock. `error` is its kind, empty when the request succeeded."""

    index: int
    input_tokens: int  # sent
    wanted_tokens: int  # asked for
    scheduled_s: float | None  # when an open loop was to send it; None in a closed loop
    sent_s: float
    ended_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)  # one entry a token: when its bytes arrived
    num_chunks: int = 0  # chunks that carried tokens
    reported_input_tokens: int | None = None  # usage.prompt_tokens
    reported_output_tokens: int | None = None  # usage.completion_tokens
    cached_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def output_tokens(self) -> int:
        """As the server counts, or as seen where it does not say."""
        return len(self.token_times_s) if self.reported_output_tokens is None else self.reported_output_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.input_tokens if self.reported_input_tokens is None else self.reported_input_tokens

    @property
    def due_s(self) -> float:
        """When the request should have been on its way: what a user of an open loop waits from."""
        return self.sent_s if self.scheduled_s is None else self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (tokens - 1); None for fewer than two tokens."""
        if not self.token_times_s or self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gap before every token but the first. Tokens that share a chunk arrived together: their gap is 0."""
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    def meets(self, slo_ttft_ms: float | None, slo_tpot_ms: float | None) -> bool:
        """Did it succeed within both limits? TTFT counts from the scheduled time where there is one."""
        if not self.ok or not self.token_times_s:
            return False
        if slo_ttft_ms is not None and (self.token_times_s[0] - self.due_s) * 1000 > slo_ttft_ms:
            return False
        return slo_tpot_ms is None or self.tpot_s is None or self.tpot_s * 1000 <= slo_tpot_ms

    def as_json(self, started_s: float) -> dict[str, Any]:
        """One line of `--output`: times in ms since the start of the run, durations in ms."""

        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds * 1000, 3)

        return {
            "index": self.index,
            "scheduled_ms": None if self.scheduled_s is None else ms(self.scheduled_s - started_s),
            "sent_ms": ms(self.sent_s - started_s),
            "input_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "wanted_tokens": self.wanted_tokens,
            "output_tokens": self.output_tokens,
            "num_chunks": self.num_chunks,
            "ttft_ms": ms(self.ttft_s),
            "tpot_ms": ms(self.tpot_s),
            "e2e_ms": ms(self.e2e_s),
            "itl_ms": [ms(gap) for gap in self.itl_s],
            "finish_reason": self.finish_reason,
            "error": self.error,
            "detail": self.detail,
        }
