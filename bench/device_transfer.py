"""KV in and out of blocks on the device, to the host, and to another process through `cuda_ipc`: right, and how fast.

A payload byte that goes through `cuda_ipc` is read and written twice (out of blocks into the ring, out of the ring into
blocks), and so is what the copy ceiling counts: both ends are on one device here, where they take turns.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from ..engine.kv_cache import TORCH_DTYPES, KVCache
from ..kernels import cache_ops
from ..transfer.device import Device, DeviceSpan
from ..transfer.device_cuda import open_device
from ..transfer.layout import KVLayout, LayerShape
from ..transfer.link_cuda_ipc import DeviceRing, DeviceRingWriter
from ..transfer.offers import DeviceIdentity, RingSpan
from .device_clock import copy_bytes_per_s, seconds, synchronize
from .device_fake import DeviceCache, FakeDevice
from .device_report import Check, Setting

BLOCK_SIZE = 16
LAYERS = 4
SHAPES = {"Llama 8B": LayerShape(8, 128, 128), "DeepSeek": LayerShape(16, 192, 128), "odd sizes": LayerShape(3, 5, 7)}
IPC_SHARE = 0.80  # of the copy ceiling
LIMIT_S = 60.0  # for the other process to say something


@dataclass(frozen=True)
class Job:
    """`rounds` times all layers of so many tokens; a slab is one layer of them."""

    tokens: int
    rounds: int
    ring_bytes: int
    dtype: str = "bfloat16"
    shape: LayerShape = SHAPES["Llama 8B"]

    @property
    def layout(self) -> KVLayout:
        return KVLayout("bench", self.dtype, (self.shape,) * LAYERS)

    @property
    def slab_bytes(self) -> int:
        return self.tokens * self.layout.layer_bytes_per_token(0)

    @property
    def num_slabs(self) -> int:
        return self.rounds * LAYERS


JOBS = {"4k-token slabs": Job(4096, 300, 512 << 20), "32k-token slabs": Job(32_768, 40, 1 << 30)}
DRY_TOKENS = 50
DRY_JOBS = {"tiny slabs": Job(40, 3, 8192, shape=LayerShape(2, 8, 12))}
# For each thing that a stream of the stand-in for a device does: whoever reads without waiting reads too early.
SENDER_LAG_S, RECEIVER_LAG_S = 0.003, 0.0002


def run(setting: Setting) -> Iterator[Check]:
    """The checks of this section."""
    for name, shape in SHAPES.items():
        for dtype in TORCH_DTYPES:
            yield from _right(setting, name, shape, dtype)
    ceiling = copy_bytes_per_s(setting.device)
    yield Check("copy ceiling", True, ceiling / 1e9, "GB/s")
    yield from _in_and_out(setting, ceiling)
    for name, job in (DRY_JOBS if setting.dry else JOBS).items():
        yield from _between_processes(setting, name, job, ceiling)


# --- in one process ----------------------------------------------------------------------------------------------


def _caches(shape: LayerShape, dtype: str, num_blocks: int) -> list[Tensor]:
    """K and V of one layer, full of noise: [num_blocks, BLOCK_SIZE, kv_heads, head_dim] each, on the host."""
    sizes = [(num_blocks, BLOCK_SIZE, shape.kv_heads, head_dim) for head_dim in (shape.k_head_dim, shape.v_head_dim)]
    return [torch.randn(size).to(TORCH_DTYPES[dtype]) for size in sizes]


def _right(setting: Setting, name: str, shape: LayerShape, dtype: str) -> Iterator[Check]:
    """Every operation changes the same bytes on the device as on the host."""
    torch.manual_seed(7)
    num_tokens = DRY_TOKENS if setting.dry else 333
    num_blocks = num_tokens // BLOCK_SIZE + 5
    expected = _caches(shape, dtype, num_blocks)
    found = [cache.to(setting.device, copy=True) for cache in expected]
    slots = torch.randperm(num_blocks * BLOCK_SIZE)[:num_tokens]
    q, k = (torch.randn(num_tokens, n, shape.k_head_dim) for n in (2 * shape.kv_heads, shape.kv_heads))
    v = torch.randn(num_tokens, shape.kv_heads, shape.v_head_dim)
    angles = torch.rand(num_tokens, shape.k_head_dim // 2 * 2) * 6
    step = [x.to(TORCH_DTYPES[dtype]) for x in (q, k, v, angles.cos(), angles.sin())]
    slabs = []
    for caches, device in ((expected, torch.device("cpu")), (found, setting.device)):
        q, k, v, cos, sin = (x.to(device, copy=True) for x in step)
        places = slots.to(device)
        cache_ops.write_kv(caches[0], caches[1], k, v, places)
        cache_ops.rotate_and_write(q, k, v, cos, sin, caches[0], caches[1], places.flip(0))
        slab = torch.empty(num_tokens * sum(cache[0, 0].nbytes for cache in caches), dtype=torch.uint8, device=device)
        cache_ops.gather(caches[0], caches[1], places, slab)
        cache_ops.scatter(caches[0], caches[1], places.roll(1), slab.cpu().numpy().data)
        cache_ops.copy_block(caches, 1, 4)
        slabs += [slab, q]
    pairs = [*zip(expected, found, strict=True), (slabs[0], slabs[2]), (slabs[1], slabs[3])]
    same = all(torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in pairs)
    yield Check(f"cache operations to the byte, {name}, {dtype}", same)


def _in_and_out(setting: Setting, ceiling: float) -> Iterator[Check]:
    """Gather and scatter of one layer, and a swap of all layers to the host."""
    job = Job(DRY_TOKENS if setting.dry else 32_768, 1, 0)
    table = _table(job, seed=1)
    cache = KVCache(job.layout, len(table), BLOCK_SIZE, setting.device)
    slots = (torch.tensor(table)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[: job.tokens]
    slots = slots.to(setting.device)
    slab = torch.empty(job.slab_bytes, dtype=torch.uint8, device=setting.device)
    k_cache, v_cache = cache.keys[0], cache.values[0]
    k, v = (torch.randn(job.tokens, *part.shape[2:]).to(part) for part in (k_cache, v_cache))
    calls: dict[str, Callable[[], None]] = {
        "gather": lambda: cache_ops.gather(k_cache, v_cache, slots, slab),
        "scatter": lambda: _scatter(cache, table, job, slab),
        "write": lambda: cache_ops.write_kv(k_cache, v_cache, k, v, slots),
    }
    for name, call in calls.items():
        rate = 2 * job.slab_bytes / seconds(call, setting.device)
        yield Check(
            f"{name}, {job.tokens} tokens", True, rate / 1e9, "GB/s", note=f"{rate / ceiling:.0%} of the ceiling"
        )
    for _ in range(2):  # the first one allocates pinned memory
        synchronize(setting.device)
        started = time.perf_counter()
        cache.gather_all(table, job.tokens)
        elapsed_s = time.perf_counter() - started
    yield Check("swap to host memory", True, LAYERS * job.slab_bytes / elapsed_s / 1e9, "GB/s")


def _scatter(cache: KVCache, table: list[int], job: Job, slab: Tensor) -> None:
    """As a worker does that has the slab in its device's memory."""
    if slab.is_cuda:
        stream = torch.cuda.current_stream(slab.device).cuda_stream
        cache.scatter_from(0, table, 0, job.tokens, DeviceSpan(slab.data_ptr(), slab.nbytes, stream))
    else:
        cache.scatter(range(1), table, 0, job.tokens, slab.numpy().data)


def _table(job: Job, seed: int) -> list[int]:
    """A fragmented table of blocks for the tokens."""
    num_blocks = -(-job.tokens // BLOCK_SIZE)
    table: list[int] = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    return table


# --- between two processes ---------------------------------------------------------------------------------------


def pattern(job: Job, layer: int, device: torch.device) -> Tensor:  # uint8 [slab_bytes]
    """What both ends know to be in that layer's slab."""
    words = torch.arange(job.slab_bytes // 2, device=device, dtype=torch.int32)
    return (words * (2 * layer + 7919) + (words >> 9)).to(torch.int16).view(torch.uint8)


def send(pipe: Connection, device: Device, cache: KVCache, table: list[int], job: Job) -> None:
    """The sending end: fill the cache, open the ring that is offered, send everything, and leave when told."""
    for layer in range(LAYERS):
        content = pattern(job, layer, cache.device)
        source = DeviceSpan(content.data_ptr(), content.nbytes, device.compute_stream)
        cache.scatter_from(layer, table, 0, job.tokens, source)
        device.synchronize(device.compute_stream)
    ring = DeviceRingWriter(device, pipe.recv())
    pipe.send("ready")
    pipe.recv()
    for number in range(job.num_slabs):
        while (room := ring.allocate(job.slab_bytes)) is None:
            ring.free_up_to(pipe.recv())
        span, memory = room
        cache.gather_to(number % LAYERS, table, 0, job.tokens, memory)
        ring.publish(span)
        pipe.send((span.position, span.num_bytes, span.slot))
    while pipe.recv() != "end":
        pass
    ring.close()


def receive(pipe: Connection, device: Device, cache: KVCache, table: list[int], job: Job) -> tuple[float, bool]:
    """The receiving end: (seconds from the word to begin until the last slab is in its blocks, is all right?)"""
    ring = DeviceRing(device, job.ring_bytes)
    pipe.send(ring.offer)
    _expect(pipe)
    spans: deque[RingSpan] = deque()
    taken, credit = 0, 0
    started = time.perf_counter()
    pipe.send("begin")
    while taken < job.num_slabs or not ring.is_settled:
        while pipe.poll(0):
            spans.append(RingSpan(*pipe.recv()))
        while spans and ring.has_arrived(spans[0]):
            span = spans.popleft()
            cache.scatter_from(taken % LAYERS, table, 0, job.tokens, ring.view(span))
            ring.taken_up_to(span.position + span.num_bytes)
            taken += 1
        if ring.settle() != credit:
            credit = ring.settle()
            pipe.send(credit)
        if time.perf_counter() - started > LIMIT_S:
            raise TimeoutError(f"{taken} of {job.num_slabs} slabs have come")
    elapsed_s = time.perf_counter() - started
    pipe.send("end")
    right = all(_holds(cache, table, layer, job) for layer in range(LAYERS))
    while not ring.reclaim():
        if time.perf_counter() - started > 2 * LIMIT_S:
            raise TimeoutError("the sender does not let go of the ring")
    ring.free()
    return elapsed_s, right


def _holds(cache: KVCache, table: list[int], layer: int, job: Job) -> bool:
    found, _ = cache.gather(range(layer, layer + 1), table, 0, job.tokens)
    return torch.equal(torch.frombuffer(found, dtype=torch.uint8), pattern(job, layer, cache.device).cpu())


def _expect(pipe: Connection) -> object:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError("the other process says nothing")
    return pipe.recv()


@contextmanager
def _end(job: Job, device: torch.device, seed: int, lag_s: float) -> Iterator[tuple[Device, KVCache, list[int]]]:
    """One end's device, blocks and table; without a GPU its device is the stand-in of the tests."""
    table = _table(job, seed)
    if device.type == "cpu":
        stand_in = FakeDevice(DeviceIdentity("none", "none", "", "", 0, 0, os.getpid()), lag_s=lag_s)
        try:
            yield stand_in, DeviceCache(job.layout, len(table), BLOCK_SIZE, stand_in), table
        finally:
            stand_in.close()
        return
    torch.cuda.set_device(device)
    opened = open_device(torch.cuda.current_device())
    if opened is None:
        raise RuntimeError("CuPy cannot be imported")
    yield opened, KVCache(job.layout, len(table), BLOCK_SIZE, device), table


def _other_process(pipe: Connection, device: torch.device, job: Job) -> None:
    with _end(job, device, seed=2, lag_s=SENDER_LAG_S) as (opened, cache, table):
        send(pipe, opened, cache, table, job)


def _between_processes(setting: Setting, name: str, job: Job, ceiling: float) -> Iterator[Check]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    other = context.Process(target=_other_process, args=(theirs, setting.device, job), daemon=True)
    other.start()
    theirs.close()
    try:
        with _end(job, setting.device, seed=3, lag_s=RECEIVER_LAG_S) as (opened, cache, table):
            elapsed_s, right = receive(mine, opened, cache, table, job)
            other.join(LIMIT_S)
    finally:
        if other.is_alive():
            other.kill()
    right = right and other.exitcode == 0
    payload = job.num_slabs * job.slab_bytes / elapsed_s
    share = 4 * payload / ceiling
    met = share >= IPC_SHARE if name == list(JOBS)[-1] else None
    target = "" if met is None else f">= {IPC_SHARE:.0%} of the copy ceiling"
    note = "on a stand-in for a device" if setting.dry else f"{share:.0%} of the ceiling, as memory traffic"
    yield Check(
        f"cuda_ipc, {name} ({job.slab_bytes >> 10} KiB)", right, payload / 1e9, "GB/s", target, met, note
    )  # fmt: skip
