"""How much memory this process may still take: the machine's, its cgroup's, or the device's."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """What the memory of a GPU is asked: the device as a whole, and this process's allocator on it."""

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """Of the device, whoever took the rest."""
        ...

    def reserved_bytes(self) -> int:
        """What this process's allocator holds of it."""
        ...

    def start_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        """The most that the allocator held since `start_peak`."""
        ...

    def release_unused(self) -> None:
        """Have the allocator give back what nobody uses."""
        ...


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device))

    def release_unused(self) -> None:
        gc.collect()  # tensors in circles of references would count as used
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def readable(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.2f} GiB" if size_bytes >= 1024**3 else f"{size_bytes / 1024**2:.1f} MiB"


def available_memory_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_available_bytes(Path("/proc"), Path("/sys/fs/cgroup"))


def host_available_bytes(proc: Path, cgroup_root: Path) -> int:
    """The least of the machine's available memory and what every enclosing cgroup (v2 and v1) leaves."""
    room = [_meminfo_available(proc / "meminfo")]
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            room += _room(cgroup_root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroup_root / "memory"
            room += _room(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return max(0, min(room))


def _meminfo_available(meminfo: Path) -> int:
    fields = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _room(root: Path, path: str, limit_file: str, usage_file: str, reclaimable: str) -> list[int]:
    """Room left in the cgroup at `path` and in all above it that have a limit.

    Inside a container `path` may name a directory that only the host sees; the walk then still ends at `root`.
    """
    rooms = []
    inside = Path(path.lstrip("/"))
    for group in (inside, *inside.parents):
        limit, usage = _read(root / group / limit_file).strip(), _read(root / group / usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            statistics = dict(line.split() for line in _read(root / group / "memory.stat").splitlines())
            # Page cache that the kernel gives back before it kills anyone.
            rooms.append(int(limit) - int(usage) + int(statistics.get(reclaimable, 0)))
    return rooms


def _read(path: Path) -> str:
    """The file's text, or "" where this kind of file does not exist."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""
