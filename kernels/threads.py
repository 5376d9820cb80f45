"""Helper threads for the kernels in C (`native/threads.c`): how many, and on which cores. torch's own ops get none.

And wishes: to have a neighbour's core for a moment while its owner, who gives way, computes.
"""

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


def give_way_at(library: ctypes.CDLL, lender: int, seat: int) -> None:
    """Whoever calls a kernel stands aside from now on while another process wishes for the core whose state is at
    `lender`, of which this process is owner number `seat`. `lender` 0: nobody does any more."""
    library.pd_give_way_at(lender, seat)


def aside_seconds(library: ctypes.CDLL) -> float:
    """For how long callers of kernels have stood aside since the process began."""
    aside_ns = ctypes.c_int64()
    library.pd_aside_ns(ctypes.addressof(aside_ns))
    return aside_ns.value / 1e9


def ask(library: ctypes.CDLL, lender: int, name: int, most_s: float) -> bool:
    """Wish for a core, under `name`, until `ask_no_more` or for `most_s`; False if somebody else wishes for it now."""
    got = ctypes.c_int64()
    library.pd_ask(lender, name, int(most_s * 1e9), ctypes.addressof(got))
    return bool(got.value)


def ask_no_more(library: ctypes.CDLL, lender: int, name: int) -> None:
    """End that wish, if it has not ended by itself."""
    library.pd_ask_no_more(lender, name)
