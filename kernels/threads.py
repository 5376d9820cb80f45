"""Helper threads for the kernels in C (`native/threads.c`): how many, and on which cores. torch's own ops get none."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

MOST_HELPERS = 31


def set_helpers(
    library: ctypes.CDLL, cores: Sequence[int], lenders: Sequence[int] | None = None, name: int = 0
) -> int:
    """From now on one thread on each of `cores` helps whoever calls a kernel; returns how many may.

    Fewer than asked for where the system allows no more. May be called at any time, while a kernel runs too. What a
    kernel computes does not depend on it. `lenders`: addresses of the cores' states on a board (`engine/cores.py`),
    which must stay mapped for ever; a core is used only while its owners are idle, by one `name` (above 0) at a time.
    """
    assert lenders is None or (len(lenders) == len(cores) and name > 0)
    c_cores = (ctypes.c_int64 * len(cores))(*cores)
    c_lenders = (ctypes.c_int64 * len(cores))(*(lenders or [0] * len(cores)))
    got = ctypes.c_int64()
    library.pd_set_threads(
        len(cores), ctypes.addressof(c_cores), ctypes.addressof(c_lenders), name, ctypes.addressof(got)
    )
    return got.value


def helped_seconds(library: ctypes.CDLL) -> list[float]:  # [MOST_HELPERS]
    """For how long each helper has worked since the process began."""
    worked_ns = (ctypes.c_int64 * MOST_HELPERS)()
    library.pd_helped_ns(ctypes.addressof(worked_ns))
    return [value / 1e9 for value in worked_ns]
