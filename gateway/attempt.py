"""Why an attempt ends before its request does."""

from __future__ import annotations

from typing import Literal

from ..transfer.messages import Failed, Gone
from .worker import Event, Lost

CROWDED_REASONS = frozenset({"revoked", "busy"})  # of `Failed`: nothing is broken, there is just no room

RetryKind = Literal["busy", "prefill_lost", "decode_lost", "failed"]


class AttemptOver(Exception):
    """This attempt cannot go on; another one may."""

    def __init__(self, kind: RetryKind, reason: str, *, died: bool = False, retryable: bool = True) -> None:
        super().__init__(reason)
        self.kind: RetryKind = kind
        self.reason = reason
        self.died = died
        self.retryable = retryable


def ending(event: Event, worker: str, from_prefill: bool) -> AttemptOver:
    """What it means for the attempt that `worker` says (or that is said of it) `event`, which does not bring it on."""
    match event:
        case Failed():
            kind: RetryKind = "busy" if event.retryable and event.reason in CROWDED_REASONS else "failed"
            return AttemptOver(kind, f"{event.reason}: {event.detail}", retryable=event.retryable)
        case Lost():
            return AttemptOver("prefill_lost" if from_prefill else "decode_lost", event.reason, died=event.died)
        case Gone():
            return AttemptOver("failed", f"{worker} does not know the attempt")
        case _:
            return AttemptOver("failed", f"{worker} sent a {type(event).__name__}, which is not its part")
