"""Why an attempt ends before its request does."""

from __future__ import annotations

from typing import Literal

from ..transfer.messages import Failed, Gone
from .worker import Event, Lost

# Of `Failed`: nothing is wrong with the request. There is no room, or somebody else's grammar took its own down.
CROWDED_REASONS = frozenset({"revoked", "preempted", "grammar_lost"})

RetryKind = Literal["busy", "preempted", "drained", "prefill_lost", "decode_lost", "failed"]


class AttemptOver(Exception):
    """This attempt cannot go on; another one may."""

    def __init__(
        self, kind: RetryKind, reason: str, *, died: bool = False, alone: bool = False, retryable: bool = True
    ) -> None:
        super().__init__(reason)
        self.kind: RetryKind = kind
        self.reason = reason
        self.died = died
        self.alone = alone
        self.retryable = retryable

    @property
    def counts(self) -> bool:
        """Does it say anything against the request? A lack of room or a planned move does not."""
        return self.kind not in ("busy", "preempted", "drained")


def ending(event: Event, worker: str, from_prefill: bool) -> AttemptOver:
    """What it means for the attempt that `worker` says (or that is said of it) `event`, which does not bring it on."""
    kind: RetryKind
    match event:
        case Failed(reason="draining"):
            return AttemptOver("drained", event.detail)
        case Failed():
            kind = "preempted" if event.retryable and event.reason in CROWDED_REASONS else "failed"
            return AttemptOver(kind, f"{event.reason}: {event.detail}", retryable=event.retryable)
        case Lost(planned=True):
            return AttemptOver("drained", event.reason)
        case Lost():
            kind = "prefill_lost" if from_prefill else "decode_lost"
            return AttemptOver(kind, event.reason, died=event.died, alone=event.alone)
        case Gone():
            return AttemptOver("failed", f"{worker} does not know the attempt")
        case _:
            return AttemptOver("failed", f"{worker} sent a {type(event).__name__}, which is not its part")
