"""A CUDA device through CuPy. Everything is done with that device current, and on torch's current stream.

What a driver may refuse before the first slab is RingUnavailable. What fails later is a fault of the device, which
ends the process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..kernels.cuda_module import cupy
from .errors import RingUnavailable
from .offers import DeviceIdentity

T = TypeVar("T")

MIG_MARK = " MIG "  # in the name of every slice, as in "NVIDIA H100 MIG 1g.10gb"
NOT_READY = 600  # cudaErrorNotReady
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def open_device(index: int) -> CudaDevice | None:
    """The CUDA device of that number, or None (and a line in the log) where CuPy cannot be imported."""
    library = cupy()
    return None if library is None else CudaDevice(library, index)


class CudaDevice:
    """Implements `Device`."""

    def __init__(self, library: Any, index: int) -> None:
        self._cuda = library.cuda
        self._runtime = library.cuda.runtime
        self._index = index
        properties = torch.cuda.get_device_properties(index)
        self.identity = DeviceIdentity(
            uuid=str(properties.uuid),
            bus=str(self._runtime.deviceGetPCIBusId(index)),
            slice=properties.name if MIG_MARK in properties.name else "",
            boot=BOOT_ID.read_text().strip(),
            pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
            ipc_namespace=os.stat("/proc/self/ns/ipc").st_ino,
            pid=os.getpid(),
        )

    @contextmanager
    def _current(self) -> Iterator[None]:
        with torch.cuda.device(self._index):
            yield

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """What the driver may refuse, for reasons that only it knows."""
        with self._current():
            try:
                return call()
            except self._runtime.CUDARuntimeError as error:
                raise RingUnavailable(f"{what}: {error}") from None

    def reaches(self, other: DeviceIdentity) -> str:
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == other.uuid:
                if torch.cuda.can_device_access_peer(self._index, index):
                    return ""
                return f"the devices {self.identity.bus} and {other.bus} have no peer access to each other"
        return ""  # hidden from this process (CUDA_VISIBLE_DEVICES): only the attempt to open its memory tells

    # --- memory ----------------------------------------------------------------------------------------------

    def malloc(self, num_bytes: int) -> int:
        call: Callable[[], int] = lambda: self._runtime.malloc(num_bytes)  # noqa: E731
        return self._ask(f"no device memory of {num_bytes} bytes", call)

    def free(self, address: int) -> None:
        with self._current():
            self._runtime.free(address)

    def write(self, address: int, content: bytes) -> None:
        source = ctypes.create_string_buffer(content, len(content))
        with self._current():
            self._runtime.memcpy(address, ctypes.addressof(source), len(content), self._runtime.memcpyHostToDevice)

    def read(self, address: int, num_bytes: int) -> bytes:
        target = ctypes.create_string_buffer(num_bytes)
        with self._current():
            self._runtime.memcpy(ctypes.addressof(target), address, num_bytes, self._runtime.memcpyDeviceToHost)
        return target.raw

    def export_memory(self, address: int) -> bytes:
        return self._ask("the memory has no handle", lambda: bytes(self._runtime.ipcGetMemHandle(address)))

    def import_memory(self, handle: bytes) -> int:
        def call() -> int:
            address: int = self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess)
            return address

        return self._ask("the other's memory cannot be opened", call)

    def release_memory(self, address: int) -> None:
        with self._current():
            self._runtime.ipcCloseMemHandle(address)

    # --- events and streams ----------------------------------------------------------------------------------

    def create_event(self, *, shared: bool) -> int:
        flags = self._runtime.eventDisableTiming | (self._runtime.eventInterprocess if shared else 0)
        call: Callable[[], int] = lambda: self._runtime.eventCreateWithFlags(flags)  # noqa: E731
        return self._ask("no event", call)

    def export_event(self, event: int) -> bytes:
        return self._ask("the event has no handle", lambda: bytes(self._runtime.ipcGetEventHandle(event)))

    def import_event(self, handle: bytes) -> int:
        call: Callable[[], int] = lambda: self._runtime.ipcOpenEventHandle(handle)  # noqa: E731
        return self._ask("the other's event cannot be opened", call)

    def destroy_event(self, event: int) -> None:
        with self._current():
            self._runtime.eventDestroy(event)

    @property
    def compute_stream(self) -> int:
        return torch.cuda.current_stream(self._index).cuda_stream

    def create_stream(self) -> int:
        def call() -> int:
            stream: int = self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking)
            return stream

        return self._ask("no stream", call)

    def destroy_stream(self, stream: int) -> None:
        with self._current():
            self._runtime.streamDestroy(stream)

    def record(self, event: int, stream: int) -> None:
        with self._current():
            self._runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        with self._current():
            self._runtime.streamWaitEvent(stream, event)

    def is_over(self, event: int) -> bool:
        with self._current():
            status: int = self._runtime.eventQuery(event)  # the only call that answers instead of raising
        if status not in (0, NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return status == 0

    def synchronize(self, stream: int) -> None:
        with self._current():
            self._runtime.streamSynchronize(stream)

