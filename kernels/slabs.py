"""KV between paged caches in memory and slabs, with the slab's checksum: in C, one pass over what moves.

The checksum is XXH3-64, so that whoever has no compiler gets the same with the xxhash library. What a slab is, and the
definition of these copies: `cache_ops.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from .library import native
from .pages import Pages

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
LONG_BYTES = 240  # of xxh3.h: shorter slabs are not for the kernels


class _CPlane(ctypes.Structure):
    """`Plane` of native/slabs.c."""

    _fields_ = (("cache", ctypes.c_void_p), ("token_bytes", ctypes.c_int64))


class _CRange(ctypes.Structure):
    """`Range` of native/slabs.c."""

    _fields_ = (
        ("planes", ctypes.c_void_p),
        ("num_planes", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("block_size", ctypes.c_int64),
        ("first_token", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
    )


def checksum(payload: memoryview | bytes) -> int:
    """XXH3-64 of the payload."""
    return xxhash.xxh3_64_intdigest(payload)


class PagedPlanes:
    """All that is kept of the tokens, as C sees it. Not for several threads at once."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[Sequence[Tensor]]) -> None:
        """`layers`: the planes [num_blocks, block_size, ...] of each, contiguous, on the processor, in the order of a
        slab; as many of every layer."""
        planes = [plane for layer in layers for plane in layer]
        assert all(plane.is_cpu and plane.is_contiguous() for plane in planes)
        self._per_layer = len(layers[0])
        self._token_bytes = [sum(plane[0, 0].nbytes for plane in layer) for layer in layers]
        self._block_size = planes[0].shape[1]
        self._library = library
        self._planes = (_CPlane * len(planes))(*(_CPlane(p.data_ptr(), p[0, 0].nbytes) for p in planes))
        self._kept = planes
        self._first_plane = ctypes.addressof(self._planes)
        self._range = _CRange(None, 0, None, self._block_size, 0, 0)
        self._sum = ctypes.c_uint64()
        self._pointers = ctypes.addressof(self._range), ctypes.addressof(self._sum)

    def gather(self, layers: range, table: IntArray, first_token: int, num_tokens: int, slab: memoryview) -> int:
        """Copy tokens [first_token, first_token + num_tokens) of the sequence with that block table into the slab.

        Returns the checksum.
        """
        return self._move(self._library.pd_gather_slab, layers, table, first_token, num_tokens, slab)

    def scatter(self, layers: range, table: IntArray, first_token: int, num_tokens: int, slab: memoryview) -> int:
        """The other way: returns the checksum of what is in the blocks now."""
        return self._move(self._library.pd_scatter_slab, layers, table, first_token, num_tokens, slab)

    def _move(
        self,
        move: ctypes._NamedFuncPointer,
        layers: range,
        table: IntArray,
        first_token: int,
        num_tokens: int,
        slab: memoryview,
    ) -> int:
        token_bytes = sum(self._token_bytes[layers.start : layers.stop])
        assert slab.nbytes == num_tokens * token_bytes > LONG_BYTES, f"a slab of {slab.nbytes} bytes"
        assert len(table) * self._block_size >= first_token + num_tokens
        self._range.planes = self._first_plane + layers.start * self._per_layer * ctypes.sizeof(_CPlane)
        self._range.num_planes = len(layers) * self._per_layer
        self._range.table = table.ctypes.data
        self._range.first_token, self._range.tokens = first_token, num_tokens
        of_range, to_sum = self._pointers
        move(of_range, np.frombuffer(slab, np.uint8).ctypes.data, to_sum)
        return self._sum.value


def paged_planes(layers: Sequence[Sequence[Tensor]]) -> PagedPlanes | None:
    """None where there are no kernels in C, or none for these planes."""
    fit = all(plane.is_cpu and plane.is_contiguous() for layer in layers for plane in layer)
    library = native() if fit else None
    return None if library is None else PagedPlanes(library, layers)


def zeros(size: tuple[int, ...], dtype: torch.dtype, pages: Pages) -> Tensor:
    """A plane on the processor, next to those before in `pages`: it takes no memory before it is written (torch would
    write all of it now), and begins with a cache line, as planes must that are stored to fastest."""
    return pages.zeros(int(np.prod(size)) * dtype.itemsize).view(dtype).view(size)
