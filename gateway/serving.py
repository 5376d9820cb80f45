"""Which workers of a model could serve a request: now, or as soon as they have started."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from .worker import Worker

LINKING_S = 5.0  # a link that was not made in this time, since both its ends are here, may never be

Pairs = list[tuple[Worker, Worker | None]]  # (decode, prefill)


def pairs(workers: Sequence[Worker], *, alone: bool) -> Pairs:
    """Ready decode workers with each ready prefill worker linked to them. If nothing at all is linked: decode workers
    alone, provided that is allowed (`alone`)."""
    decode, prefill = _by_role(w for w in workers if w.takes_work)
    linked: Pairs = [(d, p) for d, p in itertools.product(decode, prefill) if p.is_linked_to(d)]
    return linked if linked or not alone else decode_alone(workers)


def decode_alone(workers: Iterable[Worker]) -> Pairs:
    return [(w, None) for w in workers if w.register.role == "decode" and w.takes_work]


def is_starting(workers: Iterable[Worker], *, alone: bool, now: float) -> bool:
    """Where `pairs` has none: will it have some in a moment, since somebody is not quite ready or linked yet?

    `now`: on the clock of `registered_at`.
    """
    decode, prefill = _by_role(w for w in workers if not w.draining)
    if alone and any(not d.ready for d in decode):
        return True
    return any(_will_be_linked(d, p, now) for d, p in itertools.product(decode, prefill))


def _will_be_linked(decode: Worker, prefill: Worker, now: float) -> bool:
    if any(link.worker == decode.id and link.state == "refused" for link in prefill.links()):
        return False
    both_ready = decode.ready and prefill.ready
    return not both_ready or now - max(decode.registered_at, prefill.registered_at) < LINKING_S


def _by_role(workers: Iterable[Worker]) -> tuple[list[Worker], list[Worker]]:
    """(decode, prefill)."""
    here = list(workers)
    return [w for w in here if w.register.role == "decode"], [w for w in here if w.register.role == "prefill"]
