"""Choosing a kernel's tile sizes: a small fixed set, measured once a process for every shape of model.

The measurement is the caller's, on lengths that matter: what the first step after a start happens to hold says nothing.
Nothing is measured under the interpreter, or while a CUDA graph is being captured: then what is known already,
or the first of the set, is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

REPEATS = 5  # launches measured, the fastest counts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut and launched."""

    rows: int  # M: queries of a program; 0 where the kernel's shape decides
    keys: int  # BLOCK_N: keys of a step of the inner loop
    warps: int
    stages: int  # of the pipeline that loads ahead

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


_chosen: dict[Hashable, Tiles] = {}
_measuring = True


@contextmanager
def without_measuring() -> Iterator[None]:
    """What has no tiles yet takes the first of the set meanwhile."""
    global _measuring
    _measuring = False
    try:
        yield
    finally:
        _measuring = True


def choose(
    key: Hashable,
    candidates: Sequence[Tiles],
    device: torch.device,
    prepare: Callable[[], Callable[[Tiles], None]],
) -> Tiles:
    """The fastest of the candidates for what `prepare` returns; those that the device has no room for fall out."""
    if key in _chosen:
        return _chosen[key]
    if not _measuring or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return candidates[0]
    run = prepare()
    times_ms: dict[Tiles, float] = {}
    for tiles in candidates:
        try:
            times_ms[tiles] = _time_ms(partial(run, tiles))
        except OutOfResources as error:
            log.debug("%s: %s", tiles, error)
    if not times_ms:
        raise RuntimeError(f"no variant of the kernel fits {torch.cuda.get_device_name(device)}")
    best = min(times_ms, key=lambda tiles: times_ms[tiles])
    log.debug("%s: %s, of %s", key, best, times_ms)
    _chosen[key] = best
    return best


def _time_ms(run: Callable[[], object]) -> float:
    run()  # compiles
    best = float("inf")
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best
