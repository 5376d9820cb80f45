"""What two workers tell each other about memory that they could share: parts of messages, checked on arrival.

Plain dataclasses, so that the memory behind them can be tried and measured without the libraries of the wire.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

_CLOSED: Any = {"extra": "forbid"}  # for pydantic: a field that we do not know is an error
MAX_POSITION = 1 << 62  # in a ring
MIN_RING_BYTES = 64
MAX_RING_BYTES = 1 << 40
MAX_HANDLE_BYTES = 256
MAX_EVENTS = 1024
MAX_TEXT_CHARS = 256


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


@dataclass(frozen=True, slots=True)
class RingOffer:
    """Where shared memory is (`ring.py`, `lease.py`): a descriptor of that process, and how to know it."""

    __pydantic_config__: ClassVar[Any] = _CLOSED
    pid: int
    fd: int
    size_bytes: int
    secret: str

    def __post_init__(self) -> None:
        _check(1 <= self.pid <= 1 << 31 and 0 <= self.fd <= 1 << 31, "pid or fd out of range")
        _check(MIN_RING_BYTES <= self.size_bytes <= MAX_RING_BYTES, "size_bytes out of range")
        _check(re.fullmatch(r"[0-9a-f]{32}", self.secret) is not None, "secret is not 32 hexadecimal digits")


@dataclass(frozen=True, slots=True)
class RingSpan:
    """A slab's bytes in a ring. `slot`: which event of a ring in device memory tells that they are there."""

    __pydantic_config__: ClassVar[Any] = _CLOSED
    position: int
    num_bytes: int
    slot: int = 0

    def __post_init__(self) -> None:
        _check(0 <= self.position <= MAX_POSITION and 0 <= self.num_bytes <= MAX_POSITION, "span out of range")
        _check(0 <= self.slot < MAX_EVENTS, "slot out of range")


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """Which device a worker computes on, and whose memory it could open: that of processes with the same boot and
    namespaces. `uuid` and `bus` name the device; `slice` is the name of a MIG slice, empty for a whole device."""

    __pydantic_config__: ClassVar[Any] = _CLOSED
    uuid: str
    bus: str
    slice: str
    boot: str
    pid_namespace: int
    ipc_namespace: int
    pid: int

    def __post_init__(self) -> None:
        texts = (self.uuid, self.bus, self.slice, self.boot)
        _check(all(len(text) <= MAX_TEXT_CHARS for text in texts), "a text is too long")


@dataclass(frozen=True, slots=True)
class DeviceRingOffer:
    """A ring in the device memory of the receiver of slabs (`link_cuda_ipc.py`).

    `memory` is the handle of a whole allocation: the bytes of the lease's secret are at its beginning, the ring lies
    `offset` bytes behind. `events[slot]` is the handle of the event that the sender records. The sender holds the
    `lease` for as long as it has the memory open.
    """

    __pydantic_config__: ClassVar[Any] = _CLOSED
    memory: bytes
    offset: int
    size_bytes: int
    events: list[bytes]
    lease: RingOffer

    def __post_init__(self) -> None:
        handles = (self.memory, *self.events)
        _check(all(1 <= len(handle) <= MAX_HANDLE_BYTES for handle in handles), "a handle of no possible length")
        _check(1 <= len(self.events) <= MAX_EVENTS, "too many events, or none")
        _check(MIN_RING_BYTES <= self.size_bytes <= MAX_RING_BYTES, "size_bytes out of range")
        _check(0 <= self.offset <= MAX_RING_BYTES, "offset out of range")
