"""A process that opens the ring it is told of and sends slabs through it: `python -m tests.transfer.fake_sender N`.

Reads a Welcome, then the positions that it is credited; prints the span of each slab as soon as it is published.
"""

from __future__ import annotations

import os
import sys

from pdserve.bench.device_fake import FakeDevice
from pdserve.transfer.codec import decode
from pdserve.transfer.link_cuda_ipc import DeviceRingWriter
from pdserve.transfer.messages import Welcome
from pdserve.transfer.offers import DeviceIdentity

SIZES = (1, 700, 64, 1300, 3, 2048)


def main(num_slabs: int) -> None:
    device = FakeDevice(DeviceIdentity("aa", "0000:01:00.0", "", "boot", 11, 12, os.getpid()), lag_s=0.0007)
    welcome = decode(bytes.fromhex(sys.stdin.readline().strip()))
    assert isinstance(welcome, Welcome)
    assert welcome.ring is not None
    writer = DeviceRingWriter(device, welcome.ring)
    for number in range(num_slabs):
        size = SIZES[number % len(SIZES)]
        while (room := writer.allocate(size)) is None:
            writer.free_up_to(int(sys.stdin.readline()))
        span, memory = room
        target = device.view(memory.address, size)
        content = bytes([number % 251 + 1]) * size
        device.launch(memory.stream, lambda to=target, value=content: to.__setitem__(slice(None), value))
        writer.publish(span)
        print(span.position, span.num_bytes, span.slot, flush=True)
    sys.stdin.read()  # it is killed, with the memory open


if __name__ == "__main__":
    main(int(sys.argv[1]))
