"""Slabs through a ring in device memory arrive as they were sent, whatever the devices do when; and memory outlives
whoever has it open. On a device whose streams run late, see bench/device_fake.py."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pdserve.bench.device_fake import FakeDevice
from pdserve.transfer import link_cuda_ipc
from pdserve.transfer.codec import encode
from pdserve.transfer.errors import RingUnavailable
from pdserve.transfer.link_cuda_ipc import DeviceRing, DeviceRings, DeviceRingWriter
from pdserve.transfer.messages import Welcome
from pdserve.transfer.offers import DeviceIdentity, RingSpan

SIZE = 4096
HERE = DeviceIdentity("aa", "0000:01:00.0", "", "boot", 11, 12, os.getpid())


@pytest.fixture(autouse=True)
def few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_cuda_ipc, "NUM_EVENTS", 8)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    device = FakeDevice(HERE)
    yield device
    device.advance_all()
    device.close()


class Pair:
    """Both ends, each with its device; a prompt's KV is one buffer that is computed anew for every slab."""

    def __init__(self) -> None:
        self.sender = FakeDevice(dataclasses.replace(HERE, pid=1))
        self.receiver = FakeDevice(HERE)
        self.ring = DeviceRing(self.receiver, SIZE)
        self.writer = DeviceRingWriter(self.sender, self.ring.offer)
        self.blocks = bytearray(SIZE)
        self.sent: list[bytes] = []
        self.headers: list[RingSpan] = []  # on their way
        self.received: list[bytearray] = []

    def send(self, size: int) -> None:
        """One slab, if there is room for it and the blocks may be computed again."""
        if not self.writer.is_idle:
            return
        content = bytes([len(self.sent) % 251 + 1]) * size
        self.sender.launch(self.sender.compute_stream, lambda: self.blocks.__setitem__(slice(0, size), content))
        if (room := self.writer.allocate(size)) is None:
            return
        span, memory = room
        target = self.sender.view(memory.address, size)
        self.sender.launch(memory.stream, lambda: target.__setitem__(slice(None), bytes(self.blocks[:size])))
        self.writer.publish(span)
        self.headers.append(span)
        self.sent.append(content)

    def receive(self) -> None:
        if self.headers and self.ring.has_arrived(self.headers[0]):
            span = self.headers.pop(0)
            source, target = self.ring.view(span), bytearray(span.num_bytes)
            bytes_there = self.receiver.view(source.address, source.nbytes)
            self.receiver.launch(source.stream, lambda: target.__setitem__(slice(None), bytes(bytes_there)))
            self.received.append(target)
            self.ring.taken_up_to(span.position + span.num_bytes)

    def credit(self) -> None:
        self.writer.free_up_to(self.ring.settle())

    def finish(self) -> None:
        for _ in range(1000):
            if not self.headers and self.ring.is_settled:
                return
            self.sender.advance_all()
            self.receive()
            self.credit()
            self.receiver.advance_all()
            self.credit()
        pytest.fail("it does not come to an end")

    def close(self) -> None:
        self.writer.close()
        assert self.ring.reclaim()
        self.ring.free()
        assert self.receiver.live_allocations == 0
        self.sender.close()
        self.receiver.close()


ACTIONS: dict[str, Callable[[Pair, int], object]] = {
    "send": lambda pair, size: pair.send(size),
    "compute": lambda pair, _: pair.sender.advance(pair.sender.compute_stream),
    "copy out": lambda pair, _: pair.sender.advance(pair.sender.streams[-1]),
    "receive": lambda pair, _: pair.receive(),
    "copy in": lambda pair, _: pair.receiver.advance(pair.receiver.compute_stream),
    "credit": lambda pair, _: pair.credit(),
}
STEPS = st.lists(st.tuples(st.sampled_from(list(ACTIONS)), st.integers(1, SIZE // 2)), min_size=20, max_size=120)


@settings(max_examples=120, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes
@given(steps=STEPS)
def test_slabs_arrive_as_they_were_sent_however_late_the_devices_are(steps: list[tuple[str, int]]) -> None:
    pair = Pair()
    for action, size in steps:
        ACTIONS[action](pair, size)
    pair.finish()
    assert [bytes(slab) for slab in pair.received] == pair.sent
    pair.close()


def test_a_header_is_not_taken_before_its_bytes_are_there_and_their_place_not_lent_before_they_are_copied() -> None:
    pair = Pair()
    pair.send(SIZE)
    (span,) = pair.headers
    assert not pair.ring.has_arrived(span)
    pair.sender.advance(pair.sender.streams[-1], 10)  # the copy waits for the computing
    assert not pair.ring.has_arrived(span)
    assert not pair.writer.is_idle
    pair.sender.advance_all()
    assert pair.ring.has_arrived(span)
    assert pair.writer.is_idle
    pair.receive()
    pair.credit()
    assert pair.writer.allocate(1) is None  # copied out by nobody yet
    pair.receiver.advance_all()
    pair.credit()
    assert pair.writer.allocate(1) is not None
    pair.finish()
    pair.close()


def test_no_more_spans_are_under_way_than_there_are_events() -> None:
    pair = Pair()
    for _ in range(8):
        pair.send(1)
        pair.sender.advance_all()
    assert len(pair.headers) == 8
    assert pair.writer.allocate(1) is None
    pair.finish()
    assert pair.writer.allocate(1) is not None
    pair.close()


@pytest.mark.parametrize("span", [RingSpan(0, SIZE + 1), RingSpan(SIZE - 1, 2), RingSpan(0, 1, slot=8)])
def test_a_span_that_no_sender_would_make_is_known(device: FakeDevice, span: RingSpan) -> None:
    ring = DeviceRing(device, SIZE)
    assert not ring.is_possible(span)
    assert ring.reclaim()
    ring.free()


def test_memory_that_is_not_what_was_offered_is_refused_and_let_go_of(device: FakeDevice) -> None:
    ring, other = DeviceRing(device, SIZE), DeviceRing(device, SIZE)
    for change, named in (
        ({"memory": other.offer.memory}, "not the memory that was offered"),
        ({"lease": dataclasses.replace(ring.offer.lease, secret="0" * 32)}, "not the one that made the offer"),
        ({"lease": dataclasses.replace(ring.offer.lease, pid=1 << 30)}, "out of reach"),
        ({"lease": dataclasses.replace(ring.offer.lease, fd=0)}, "not a lease|out of reach"),
    ):
        with pytest.raises(RingUnavailable, match=named):
            DeviceRingWriter(device, dataclasses.replace(ring.offer, **change))
    device.refuses_imports = "the other's memory cannot be opened: cudaErrorMapBufferObjectFailed"
    with pytest.raises(RingUnavailable, match="MapBufferObjectFailed"):
        DeviceRingWriter(device, ring.offer)
    for each in (ring, other):
        assert each.reclaim()
        each.free()


def test_memory_is_freed_only_when_the_sender_has_let_go(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_cuda_ipc, "GRACE_S", 0.0)
    rings = DeviceRings(device, SIZE)
    writer = DeviceRingWriter(device, rings.offer("prefill-0#00000000/1"))
    rings.drop("prefill-0#00000000/1")
    rings.free_what_is_over()
    assert device.live_allocations == 1
    writer.close()
    rings.free_what_is_over()
    rings.free_what_is_over()
    assert device.live_allocations == 0


def test_an_offer_that_nobody_takes_up_is_taken_back(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_cuda_ipc, "GRACE_S", 0.0)
    monkeypatch.setattr(link_cuda_ipc, "CLAIM_S", 0.0)
    rings = DeviceRings(device, SIZE)
    offer, taken = rings.offer("prefill-0#00000000/1"), rings.offer("prefill-1#00000000/1")
    writer = DeviceRingWriter(device, taken)
    for _ in range(3):
        rings.free_what_is_over()
    with pytest.raises(RingUnavailable):
        DeviceRingWriter(device, offer)
    assert device.live_allocations == 1
    assert rings.get("prefill-1#00000000/1") is not None
    writer.close()
    rings.close()
    assert device.live_allocations == 0


def test_only_so_many_rings_are_made(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_cuda_ipc, "MAX_RINGS", 2)
    rings = DeviceRings(device, SIZE)
    assert rings.offer("a/1") == rings.offer("a/1")
    rings.offer("b/1")
    with pytest.raises(RingUnavailable, match="2 rings already"):
        rings.offer("c/1")
    rings.close()
    with pytest.raises(RingUnavailable, match="does not compute on a CUDA device"):
        DeviceRings(None, SIZE).offer("a/1")


class OtherProcess:
    """A sender of its own process, whose device lags; it prints the span of every slab that it has published."""

    def __init__(self, ring: DeviceRing, num_slabs: int) -> None:
        command = (sys.executable, "-m", "tests.transfer.fake_sender", str(num_slabs))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.spans: deque[RingSpan] = deque()
        threading.Thread(target=self._listen, daemon=True).start()
        self.say(encode(Welcome("decode-0#00000000", 1, "cuda_ipc", "", ring.offer)).hex())

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.spans.append(RingSpan(*map(int, line.split())))

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)


def take_all(sender: OtherProcess, ring: DeviceRing, device: FakeDevice, num_slabs: int) -> list[bytearray]:
    """What a decode worker does, turn after turn."""
    copies: list[bytearray] = []
    credit, deadline = 0, time.monotonic() + 60
    while len(copies) < num_slabs or not ring.is_settled:
        assert time.monotonic() < deadline, f"{len(copies)} slabs have come"
        if sender.spans and ring.has_arrived(sender.spans[0]):
            span = sender.spans.popleft()
            source, target = ring.view(span), bytearray(span.num_bytes)
            there = device.view(source.address, source.nbytes)
            device.launch(source.stream, lambda to=target, origin=there: to.__setitem__(slice(None), bytes(origin)))
            copies.append(target)
            ring.taken_up_to(span.position + span.num_bytes)
        if ring.settle() != credit:
            credit = ring.settle()
            sender.say(str(credit))
        time.sleep(0.0001)
    return copies


def test_another_process_sends_through_the_ring_and_its_death_frees_the_memory() -> None:
    device = FakeDevice(HERE, lag_s=0.0005)
    ring = DeviceRing(device, SIZE)
    sender = OtherProcess(ring, num_slabs=100)
    try:
        for number, content in enumerate(take_all(sender, ring, device, 100)):
            assert content == bytes([number % 251 + 1]) * len(content), f"slab {number}"
        assert not ring.reclaim()  # it lives, and has it open
    finally:
        sender.end()
    assert ring.reclaim()
    ring.free()
    assert device.live_allocations == 0
    device.close()
