"""An event loop whose time passes only while it has nothing to do, and by no more than it meant to wait: on a machine
that is busy with other things, simulations give the same figures as on an idle one. (ZeroMQ's threads live in real
time, so waits are real ones, too, only shorter.)"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


REAL_SHARE = 0.5  # of a wait


class _Selector(selectors.DefaultSelector):
    """`now`: the sum of all waits, as long as they were meant to be."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits, and nothing will ever happen"
        ready = super().select(max(timeout, 0.0) * REAL_SHARE)
        if not ready:
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def now() -> float:
    """Of the loop that runs this."""
    return asyncio.get_running_loop().time()


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that runs on such a loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
