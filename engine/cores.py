"""Idle cores, lent from one worker of a machine to another.

A worker computes on one thread, on a core of its own. While it has nothing to do, a neighbour whose step is running may
use that core for a helper thread (`kernels/native/threads.c`), and gives it back when the owner has work again, after
the item in hand: about 100 µs, or some milliseconds of attention over a long context. A step's results are the same to
the bit, however many threads it ran on.

A worker marks itself busy (`core_board.py`) when a step begins, a prefill worker as soon as anything arrives, and idle
when it is about to wait with nothing to compute. Helpers look at that mark before every item. Once a second a worker
looks who else is there.

A worker that computes prompts gives way: a neighbour may ask for its core while it is busy, for one step at a time. It
then stands aside from the item in hand to the end of that step, or for 100 ms, and for three quarters of its time at
most, however many ask.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

from ..kernels.library import native
from ..kernels.threads import (
    MOST_HELPERS,
    aside_seconds,
    ask,
    ask_no_more,
    give_way_at,
    helped_seconds,
    set_helpers,
)
from .core_board import BOARD_CORES, SEATS, CoreBoard, Seat, Unavailable, board_path
from .worker_flags import WorkerConfig

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LONGEST_WISH_S = 0.1  # see LONGEST_WISH_NS in native/threads.c


class Cores:
    """One worker's part in it: says when it is busy, and borrows its neighbours' cores for its own kernels.

    Without a board it does nothing.
    """

    def __init__(
        self, board: CoreBoard | None, seat: Seat | None, others: Collection[int], *, gives_way: bool = False
    ) -> None:
        """`seat`: taken; `others`: the cores it may compute on besides its own, if their owners lend them.
        `gives_way`: it stands aside when somebody asks for its core."""
        self._board = board
        self._seat = seat
        self._others = sorted(core for core in others if core < BOARD_CORES and (seat is None or core != seat.core))
        self._library = native() if board is not None else None
        self._lent: list[int] = []
        self._busy = True
        self._look_at = 0.0
        self._worked_s = helped_seconds(self._library) if self._library is not None else []
        self._asked: int | None = None
        self._wishes = 0
        self._gives_way = False
        if gives_way and board is not None and seat is not None and self._library is not None:
            self._gives_way = True
            give_way_at(self._library, board.lender(seat.core), seat.number)
            board.mark(seat, busy=True, gives_way=True)

    def busy(self) -> None:
        """This worker is about to work: nobody may use its core any more."""
        if self._board is not None and self._seat is not None and not self._busy:
            self._busy = True
            self._board.mark(self._seat, busy=True, gives_way=self._gives_way)

    def idle(self) -> None:
        """This worker is about to wait, with nothing to compute."""
        if self._board is not None and self._seat is not None and self._busy:
            self._busy = False
            self._board.mark(self._seat, busy=False)

    def look(self, now: float) -> None:
        """From time to time: who else is there? Their cores get a helper each, which works while they are idle."""
        if self._board is None or self._seat is None or self._library is None or now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        lent = [core for core in self._others if self._board.owned(core)][:MOST_HELPERS]
        if lent != self._lent:
            self._lent = lent
            lenders = [self._board.lender(core) for core in lent]
            got = set_helpers(self._library, lent, lenders, self._seat.name)
            log.info("computes on core %d, and on %d of %s while idle", self._seat.core, got, lent)

    @property
    def borrows(self) -> bool:
        """Are there cores that it may use while they are idle?"""
        return bool(self._lent)

    def ask(self) -> bool:
        """Ask a busy neighbour for its core, until `ask_no_more` or for LONGEST_WISH_S; False if none can be asked.

        Whoever is asked has the next turn last.
        """
        assert self._asked is None
        if self._board is None or self._seat is None or self._library is None:
            return False
        open_to_it = [core for core in self._lent if self._board.may_be_asked(core)]
        for turn in range(len(open_to_it)):
            core = open_to_it[(self._wishes + turn) % len(open_to_it)]
            if ask(self._library, self._board.lender(core), self._seat.name, LONGEST_WISH_S):
                self._asked = core
                self._wishes += 1
                return True
        return False

    def ask_no_more(self) -> None:
        """The step is over."""
        if self._asked is not None and self._board is not None and self._seat is not None and self._library is not None:
            ask_no_more(self._library, self._board.lender(self._asked), self._seat.name)
        self._asked = None

    def aside_s(self) -> float:
        """Seconds that this worker has stood aside for others, in all."""
        return aside_seconds(self._library) if self._library is not None else 0.0

    def helped_s(self) -> float:
        """Seconds that helpers have worked, in all."""
        return sum(helped_seconds(self._library)) if self._library is not None else 0.0

    def helped(self) -> tuple[float, int]:
        """(seconds that helpers have worked, how many of them did) since the last call."""
        if self._library is None:
            return 0.0, 0
        before, self._worked_s = self._worked_s, helped_seconds(self._library)
        more = [now - then for now, then in zip(self._worked_s, before, strict=True)]
        return sum(more), sum(seconds > 0 for seconds in more)

    def close(self) -> None:
        if self._board is not None:
            self.ask_no_more()
            if self._library is not None:
                set_helpers(self._library, [])
                if self._gives_way:
                    give_way_at(self._library, 0, 0)
            self._board.close()
            self._board = None


def no_cores() -> Cores:
    """For a worker that neither lends nor borrows."""
    return Cores(None, None, ())


def take_cores(config: WorkerConfig, allowed: Collection[int], *, gives_way: bool = False) -> Cores:
    """Take part in lending, if the flags say so and this process is bound to one core.

    `allowed`: the cores that it may use at all. `gives_way`: see `Cores`. Raises nothing: what stands in the way of
    lending is logged.
    """
    if config.lease_cores == "never" or not hasattr(os, "sched_getaffinity"):
        return no_cores()
    own = os.sched_getaffinity(0)
    if len(own) != 1:
        log.info("not bound to one core (--cpu): idle cores are neither lent nor borrowed")
        return no_cores()
    (core,) = own
    try:
        board = CoreBoard(board_path())
    except Unavailable as reason:
        log.warning("idle cores are neither lent nor borrowed: %s", reason)
        return no_cores()
    seat = board.take_seat(core)
    if seat is None:
        board.close()
        log.warning("core %d has %d workers already: this one neither lends nor borrows", core, SEATS)
        return no_cores()
    computes_here = config.engine.device == "cpu"
    return Cores(board, seat, allowed if computes_here else (), gives_way=gives_way and computes_here)
