"""The paged KV cache of one worker: its tensors, how large they may be, and slabs in and out of them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..kernels import cache_ops, cache_ops_cuda
from ..kernels.kv_int8 import Scales
from ..kernels.pages import Pages
from ..kernels.slabs import LONG_BYTES, IntArray, PagedPlanes, checksum, paged_planes, zeros
from ..transfer.device import DeviceSpan
from ..transfer.errors import ConfigError
from ..transfer.layout import KVLayout
from .memory import available_memory_bytes, readable

DEFAULT_LIMIT_BYTES = 2 * 1024**3
DEFAULT_SHARE = 0.15
KEPT_SLOTS = 64  # token ranges whose slots stay on the device: those of the prompts in one step

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, pages: Pages) -> Tensor:
    return zeros(size, dtype, pages) if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)


class KVCache:
    """Blocks of KV for every layer. Which block belongs to whom is the block pool's business, not known here.

    Behind the pool's blocks there is one more, `spare_block`, where steps of a fixed size put what nobody will read.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int, device: str | torch.device = "cpu") -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.layout = layout
        self.num_blocks = num_blocks
        self.spare_block = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self._device_slots: OrderedDict[tuple[int, int, int, bytes], Tensor] = OrderedDict()
        dtype = torch.int8 if layout.dtype == "int8" else TORCH_DTYPES[layout.dtype]
        pages = Pages()
        self.keys: list[Tensor] = []  # per layer [num_blocks + 1, block_size, kv_heads, k_head_dim]
        self.values: list[Tensor] = []  # per layer [num_blocks + 1, block_size, kv_heads, v_head_dim]
        for shape in layout.layers:
            for caches, head_dim in ((self.keys, shape.k_head_dim), (self.values, shape.v_head_dim)):
                size = (num_blocks + 1, block_size, shape.kv_heads, head_dim)
                caches.append(_zeros(size, dtype, self.device, pages))
        self.scales: list[Scales | None] = [None] * layout.num_layers  # per layer
        if layout.dtype == "int8":
            for layer, shape in enumerate(layout.layers):
                plane = (num_blocks + 1, block_size, shape.kv_heads)
                k_scales, v_scales = (_zeros(plane, torch.float32, self.device, pages) for _ in range(2))
                self.scales[layer] = k_scales, v_scales
        self._table: tuple[list[int], IntArray] = [], np.empty(0, np.int64)  # the last that slabs went in or out by

    @cached_property
    def _planes(self) -> PagedPlanes | None:
        """None where C has nothing to offer."""
        layers = zip(self.keys, self.values, self.scales, strict=True)
        return paged_planes([(keys, values, *(scales or ())) for keys, values, scales in layers])

    def _blocks_of(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> IntArray:
        """Those blocks of a sequence that hold its tokens first_token .. first_token + num_tokens - 1."""
        first_block = first_token // self.block_size
        last_block = (first_token + num_tokens + self.block_size - 1) // self.block_size
        assert num_tokens > 0, "an empty token range"
        assert last_block <= len(blocks), f"{len(blocks)} blocks do not cover token {first_token + num_tokens - 1}"
        wanted = list(blocks[first_block:last_block])
        if wanted != self._table[0]:  # as a rule it is as it was for the layer before
            self._table = wanted, np.asarray(wanted, dtype=np.int64)
        return self._table[1]

    def _slots(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> Tensor:
        """Where tokens first_token .. first_token + num_tokens - 1 of a sequence lie: [num_tokens] int64.

        With a cache on a GPU they are copied there without waiting for it, and kept for the other layers of the step.
        """
        table = self._blocks_of(blocks, first_token, num_tokens)
        if self.device.type == "cpu":
            return self._slots_of(table, first_token, num_tokens)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        key = stream, first_token, num_tokens, table.tobytes()
        if (slots := self._device_slots.get(key)) is None:
            pinned = self._slots_of(table, first_token, num_tokens).pin_memory()
            slots = self._device_slots[key] = pinned.to(self.device, non_blocking=True)
            if len(self._device_slots) > KEPT_SLOTS:
                self._device_slots.popitem(last=False)
        return slots

    def _slots_of(self, table: IntArray, first_token: int, num_tokens: int) -> Tensor:
        slots = (torch.from_numpy(table)[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
        skipped = first_token % self.block_size
        return slots[skipped : skipped + num_tokens]

    def gather(
        self, layers: range, blocks: Sequence[int], first_token: int, num_tokens: int, out: memoryview | None = None
    ) -> tuple[memoryview, int]:
        """Copy a token range of some layers into `out` or a fresh buffer, in the canonical slab layout; its checksum.

        `blocks` is the sequence's block table from its first token on.
        """
        if out is None:
            out = self._buffer(num_tokens * self.layout.bytes_per_token_of(layers))
        if self._planes is not None and out.nbytes > LONG_BYTES:
            table = self._blocks_of(blocks, first_token, num_tokens)
            return out, self._planes.gather(layers, table, first_token % self.block_size, num_tokens, out)
        slots = self._slots(blocks, first_token, num_tokens)
        for layer, part in self._parts(layers, num_tokens, out):
            self._gather(layer, slots, part)
        self._wait()
        return out, checksum(out)

    def _parts(self, layers: range, num_tokens: int, slab: memoryview) -> Iterator[tuple[int, memoryview]]:
        """A slab cut into those of single layers."""
        start = 0
        for layer in layers:
            end = start + num_tokens * self.layout.layer_bytes_per_token(layer)
            yield layer, slab[start:end]
            start = end

    def gather_all(self, blocks: Sequence[int], num_tokens: int) -> list[memoryview]:
        """Copy the first tokens of every layer into fresh buffers."""
        if self.device.type == "cpu":
            layers = range(self.layout.num_layers)
            return [self.gather(layers[i : i + 1], blocks, 0, num_tokens)[0] for i in layers]
        slots = self._slots(blocks, 0, num_tokens)
        slabs = [self._buffer(num_tokens * self.layout.layer_bytes_per_token(i)) for i in range(self.layout.num_layers)]
        for layer, slab in enumerate(slabs):
            self._gather(layer, slots, slab)
        self._wait()
        return slabs

    def _buffer(self, num_bytes: int) -> memoryview:
        """Host memory; beside a GPU pinned, so that the device copies into it on its own."""
        if self.device.type == "cpu":
            return np.empty(num_bytes, dtype=np.uint8).data
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data

    def _gather(self, layer: int, slots: Tensor, out: memoryview) -> None:
        """On a GPU the copy to pinned memory is only launched."""
        slab = torch.frombuffer(out, dtype=torch.uint8)
        if self.device.type == "cpu":
            cache_ops.gather(self.keys[layer], self.values[layer], slots, slab, self.scales[layer])
        else:
            staging = torch.empty_like(slab, device=self.device)
            cache_ops.gather(self.keys[layer], self.values[layer], slots, staging)
            slab.copy_(staging, non_blocking=True)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    def scatter(
        self, layers: range, blocks: Sequence[int], first_token: int, num_tokens: int, payload: memoryview
    ) -> int:
        """Copy a slab into the blocks of a token range of some layers. The payload has the right size.

        Returns the checksum of what was copied, for whoever must know whether it is what was sent.
        """
        assert payload.nbytes == num_tokens * self.layout.bytes_per_token_of(layers), "a slab of the wrong size"
        if self._planes is not None and payload.nbytes > LONG_BYTES:
            table = self._blocks_of(blocks, first_token, num_tokens)
            return self._planes.scatter(layers, table, first_token % self.block_size, num_tokens, payload)
        slots = self._slots(blocks, first_token, num_tokens)
        for layer, part in self._parts(layers, num_tokens, payload):
            cache_ops.scatter(self.keys[layer], self.values[layer], slots, part, self.scales[layer])
        return checksum(payload)

    def _stream(self, span: DeviceSpan) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(self.device)
        if span.stream == current.cuda_stream:  # of the default stream, 0, torch would make another one
            return current
        return torch.cuda.ExternalStream(span.stream, device=self.device)  # type: ignore[no-untyped-call]

    def gather_to(self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, out: DeviceSpan) -> None:
        """As `gather`, into device memory (maybe another device's) on the span's stream, without waiting."""
        assert out.nbytes == num_tokens * self.layout.layer_bytes_per_token(layer), "room of the wrong size"
        with torch.cuda.stream(self._stream(out)):
            slots = self._slots(blocks, first_token, num_tokens)
            cache_ops_cuda.gather(self.keys[layer], self.values[layer], slots, out.address)

    def scatter_from(
        self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int, payload: DeviceSpan
    ) -> None:
        """As `scatter`, from device memory on the span's stream, without waiting."""
        assert payload.nbytes == num_tokens * self.layout.layer_bytes_per_token(layer), "a slab of the wrong size"
        with torch.cuda.stream(self._stream(payload)):
            slots = self._slots(blocks, first_token, num_tokens)
            cache_ops_cuda.scatter(self.keys[layer], self.values[layer], slots, payload.address)

    def copy_block(self, source: int, target: int) -> None:
        """Copy all layers of one block onto another."""
        planes = [plane for scales in self.scales for plane in scales or ()]
        cache_ops.copy_block([*self.keys, *self.values, *planes], source, target)


def parse_size(text: str) -> int:
    """Bytes of a size like "512M", "2G", "1.5GiB" or "1048576"; units are powers of 1024. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE | re.ASCII)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise ConfigError(f"{text!r} is not a memory size; write for example 512M or 2G")
    return size


def plan_num_blocks(
    layout: KVLayout,
    block_size: int,
    kv_blocks: int | None,
    kv_memory_bytes: int | None,
    device: str | torch.device,
    room_bytes: int | None = None,
) -> int:
    """How many blocks the cache gets: as asked; else all of `room_bytes` where that is known (`budget.py`); else the
    lesser of 2 GiB and 15 % of what is available.

    Raises ConfigError when that is more than the device, or this process's cgroup, has left.
    """
    if kv_blocks is not None and kv_memory_bytes is not None:
        raise ConfigError("give --kv-blocks or --kv-memory, not both")
    available_bytes = available_memory_bytes(torch.device(device)) if room_bytes is None else room_bytes
    block_bytes = layout.bytes_per_token * block_size
    if kv_blocks is not None:
        num_blocks, asked = kv_blocks, f"--kv-blocks {kv_blocks}"
    elif kv_memory_bytes is not None:
        num_blocks, asked = kv_memory_bytes // block_bytes, "--kv-memory"
    elif room_bytes is not None:
        num_blocks, asked = room_bytes // block_bytes - 1, "the memory left"  # one is the spare block
    else:
        num_blocks, asked = int(min(DEFAULT_LIMIT_BYTES, available_bytes * DEFAULT_SHARE)) // block_bytes, "the default"
    if num_blocks < 1:
        raise ConfigError(f"{asked} leaves no room for a single KV block of {readable(block_bytes)}")
    if num_blocks * block_bytes > available_bytes:
        raise ConfigError(
            f"{asked} needs {readable(num_blocks * block_bytes)} for KV, but {readable(available_bytes)} is available"
        )
    return num_blocks
