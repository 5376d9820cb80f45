"""A device's memory, streams and events as far as a link between two processes needs them. `device_cuda.py` is the real
one; tests and dry runs have one over host memory whose streams run late (`bench/device_fake.py`).

Addresses, streams and events are plain numbers, as CUDA has them. Nothing here waits unless it says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .offers import DeviceIdentity


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """Bytes in device memory, and the stream on which they are to be read or written."""

    address: int
    nbytes: int
    stream: int


class Device(Protocol):
    """One device, as one process has it. What the driver refuses raises RingUnavailable with its reason."""

    @property
    def identity(self) -> DeviceIdentity: ...

    def reaches(self, other: DeviceIdentity) -> str:
        """Why this device cannot write to another's memory; empty if it can, or if only an attempt would tell."""
        ...

    def malloc(self, num_bytes: int) -> int:
        """An allocation of its own, whose handle another process may open."""
        ...

    def free(self, address: int) -> None: ...

    def write(self, address: int, content: bytes) -> None:
        """Waits until it is done, as `read` does."""
        ...

    def read(self, address: int, num_bytes: int) -> bytes: ...

    def export_memory(self, address: int) -> bytes:
        """The handle of an allocation, by its first address."""
        ...

    def import_memory(self, handle: bytes) -> int:
        """The first address, here, of an allocation of another process."""
        ...

    def release_memory(self, address: int) -> None: ...

    def create_event(self, *, shared: bool) -> int: ...

    def export_event(self, event: int) -> bytes: ...

    def import_event(self, handle: bytes) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    @property
    def compute_stream(self) -> int:
        """The stream on which the model's kernels are launched just now."""
        ...

    def create_stream(self) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """The event is over when all that was launched on the stream so far is."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """What is launched on the stream from now on begins after the event as it was recorded last."""
        ...

    def is_over(self, event: int) -> bool:
        """Also of an event that was never recorded."""
        ...

    def synchronize(self, stream: int) -> None:
        """Waits until all that was launched on the stream is done."""
        ...
