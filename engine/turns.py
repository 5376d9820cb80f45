"""When the loop of a worker looks up from its step, and how it sleeps between two: the same for both pools."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import zmq

from ..transfer.waiting import Waiter

IDLE_WAIT_MS = 50
DEVICE_WAIT_MS = 1  # while something waits for a device, which does not wake a socket
LOOK_UP_EVERY_S = 0.004  # in the middle of a step


class Turns:
    """Of one loop."""

    def __init__(self) -> None:
        self._waiter = Waiter()
        self._looked_up_at = 0.0

    def looked_up(self) -> None:
        """The control sockets have been read just now."""
        self._looked_up_at = time.monotonic()

    @property
    def must_look_up(self) -> bool:
        """Has a step gone on for so long that somebody may be waiting for a word?"""
        return time.monotonic() - self._looked_up_at >= LOOK_UP_EVERY_S

    def wait(self, sockets: Iterable[zmq.Socket[Any]], descriptor: int | None, *, for_device: bool) -> bool:
        """Sleep until one of them can be read; False when none could before it is time to look again."""
        return self._waiter.wait(sockets, descriptor, DEVICE_WAIT_MS if for_device else IDLE_WAIT_MS)
