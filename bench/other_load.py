"""How much of the machine was busy with something that is no part of the measurement (Linux; None elsewhere)."""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
IDLE_FIELDS = (3, 4)  # of the first line of /proc/stat: idle, and waiting for a disk
NUM_FIELDS = 8  # what follows, time of guests, is in the others already


class OtherLoad:
    """From its making on. This process and all that descend from it are the measurement."""

    def __init__(self) -> None:
        self._started = time.monotonic(), _machine_s(), _own_s()

    def cores(self) -> float | None:
        """Cores that others used, on average, until now."""
        started, machine, own = self._started
        if machine is None or (machine_now := _machine_s()) is None:
            return None
        elapsed = max(time.monotonic() - started, 1e-3)
        return max(0.0, (machine_now - machine - (_own_s() - own)) / elapsed)


def _machine_s() -> float | None:
    """Processor time that the machine has spent on anything."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return None
    ticks = [int(field) for field in first.split()[1 : 1 + NUM_FIELDS]]
    return (sum(ticks) - sum(ticks[i] for i in IDLE_FIELDS)) / TICKS_PER_S


def _own_s() -> float:
    """Processor time of this process's tree: what is alive of it, and what it has waited for."""
    children: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(entry.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        spent[pid] = sum(map(int, fields[11:15])) / TICKS_PER_S
    todo, total = [os.getpid()], 0.0
    while todo:
        pid = todo.pop()
        total += spent.get(pid, 0.0)
        todo += children.get(pid, [])
    return total
