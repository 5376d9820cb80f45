"""Times on a device, and the most bytes a second it can copy: what bandwidths are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

COPY_BYTES = 4 << 30
REPEAT, WARM_UP = 10, 3  # calls that are measured, and before them


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(
    function: Callable[[], object], device: torch.device, *, repeat: int = REPEAT, warm_up: int = WARM_UP
) -> float:
    """Median wall time of one call, with the device idle before it and done after it."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeat):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def copy_bytes_per_s(device: torch.device, size_bytes: int = COPY_BYTES) -> float:
    """Bytes read and written per second by the fastest of some large copies."""
    if device.type != "cuda":
        size_bytes = 1 << 20
    source = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return max(2 * size_bytes / seconds(lambda: target.copy_(source), device, repeat=3) for _ in range(5))
