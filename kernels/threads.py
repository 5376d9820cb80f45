"""Helper threads for the kernels in C (`native/threads.c`): how many, and on which cores. torch's own ops get none."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

MOST_HELPERS = 31


def set_helpers(library: ctypes.CDLL, cores: Sequence[int]) -> int:
    """From now on one thread on each of `cores` helps whoever calls a kernel; returns how many do.

    Fewer than asked for where the system allows no more. May be called at any time, while a kernel runs too. What a
    kernel computes does not depend on it.
    """
    array = (ctypes.c_int64 * len(cores))(*cores)
    got = ctypes.c_int64()
    library.pd_set_threads(len(cores), ctypes.addressof(array), ctypes.addressof(got))
    return got.value


def helped_seconds(library: ctypes.CDLL) -> float:
    """For how long helpers have worked since the process began, all of them together."""
    total = ctypes.c_int64()
    library.pd_helped_ns(ctypes.addressof(total))
    return total.value / 1e9
