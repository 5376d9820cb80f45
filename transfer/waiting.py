"""Waiting for whichever of some sockets has something first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import zmq


class Waiter:
    """Keeps its poller for as long as it is to watch the same."""

    def __init__(self) -> None:
        self._sockets: list[zmq.Socket[Any]] = []
        self._descriptor: int | None = None
        self._poller = zmq.Poller()

    def wait(self, sockets: Iterable[zmq.Socket[Any]], descriptor: int | None, timeout_ms: int) -> bool:
        """Sleep until one of them can be read; False when none could in that time."""
        now = list(sockets)
        same = len(now) == len(self._sockets) and all(a is b for a, b in zip(now, self._sockets, strict=True))
        if not same or descriptor != self._descriptor:
            self._sockets, self._descriptor, self._poller = now, descriptor, zmq.Poller()
            for each in now if descriptor is None else (*now, descriptor):
                self._poller.register(each, zmq.POLLIN)
        return bool(self._poller.poll(timeout_ms))
