"""What tests of lent cores share: work that helpers can do, and whether they did."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch

from pdserve.kernels.library import native
from pdserve.kernels.pages import Pages
from pdserve.kernels.strips import StripWeight
from pdserve.kernels.threads import helped_seconds

WAIT_S = 20.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S} s"
        time.sleep(0.01)


def two_cores() -> tuple[int, int]:
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < 2 or native() is None:
        pytest.skip("needs two cores and the kernels in C")
    return ours[0], ours[1]


def some_work() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 576, generator=generator) for size in (16, 1536))
    library = native()
    assert library is not None
    return StripWeight(weight, library, Pages()).product(x)


def helped_by(work: Callable[[], object], seconds: float) -> bool:
    """Whether any helper worked while this was repeated for so long (or until one did)."""
    library = native()
    assert library is not None
    before, deadline = sum(helped_seconds(library)), time.monotonic() + seconds
    while sum(helped_seconds(library)) == before and time.monotonic() < deadline:
        work()
    return sum(helped_seconds(library)) > before
