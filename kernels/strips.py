"""Float32 weights kept in as few bytes as their numbers need, and products with them: `native/strips.c`.

A step of few rows takes as long as its weights take to come from memory. Weights that were once shorter still are, to
the bit: checkpoints hold bfloat16 or half precision, and GGUF files bytes or nibbles with a scale, that a loader made
float32. `StripWeight` looks for the shortest form that gives back exactly the numbers it was given, and the kernels
make floats of it in registers. So products are those of float32 weights; only memory is saved, and its time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .pages import Pages
from .quantized import GROUP, CProjection

Form = Literal["float32", "float16", "bfloat16", "bytes", "nibbles"]
KINDS: dict[Form, int] = {"float32": 33, "float16": 34, "bfloat16": 35, "bytes": 36, "nibbles": 37}  # native/linear.h

WORD = 8  # nibbles in a word
ROWS_AT_ONCE = 64  # that are looked at, so that they stay in cache


@dataclass(frozen=True)
class Grouped:
    """weight = min + scale * value."""

    values: Tensor  # [out, groups, GROUP] int8, or uint8 up to 15
    scales: Tensor  # [out, groups] float16
    minima: Tensor | None  # the same

    def floats(self) -> Tensor:  # [out, groups, GROUP]
        products = self.scales[..., None].float() * self.values.float()
        return products if self.minima is None else products + self.minima[..., None].float()


def as_bytes(groups: Tensor) -> Grouped:  # [out, groups, GROUP] float32
    """The bytes and scales these numbers may have been made of: the largest is 127 times its scale (Q8_0)."""
    scales = (groups.abs().amax(dim=2) / 127.0).half()
    values = (groups / _divisor(scales)[..., None]).round_().clamp_(-127.0, 127.0)
    return Grouped(values.nan_to_num_().to(torch.int8), scales, None)


def as_nibbles(groups: Tensor) -> Grouped:  # [out, groups, GROUP] float32
    """The nibbles these numbers may have been made of: from the least to the largest in 15 steps (Q4_1)."""
    least, most = torch.aminmax(groups, dim=2)
    return _nibbles(groups, ((most - least) / 15.0).half(), least.half())


def as_centred_nibbles(groups: Tensor) -> Grouped:  # [out, groups, GROUP] float32
    """The same, from eight steps below zero to seven above, or the other way round (Q4_0)."""
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))[..., 0]
    return _nibbles(groups, (largest / -8.0).half(), largest.half())


def _nibbles(groups: Tensor, scales: Tensor, minima: Tensor) -> Grouped:
    values = ((groups - minima[..., None].float()) / _divisor(scales)[..., None]).round_().clamp_(0.0, 15.0)
    return Grouped(values.nan_to_num_().to(torch.uint8), scales, minima)


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales.float())


GROUPINGS: tuple[tuple[Form, Callable[[Tensor], Grouped]], ...] = (
    ("nibbles", as_nibbles), ("nibbles", as_centred_nibbles), ("bytes", as_bytes)
)  # fmt: skip


@dataclass(frozen=True)
class _Panel:
    """How many columns the kernels keep together: some strips of some columns each."""

    columns: int
    strips: int

    @property
    def outs(self) -> int:
        return self.columns * self.strips


class StripWeight:
    """A float32 weight, [out, k], in the shortest form that gives its numbers back; next to those before in `pages`."""

    def __init__(self, weight: Tensor, library: ctypes.CDLL, pages: Pages, at_least: Form | None = None) -> None:
        """`at_least`: no shorter form than this one."""
        columns, strips = ctypes.c_int64(), ctypes.c_int64()
        library.pd_panel(ctypes.addressof(columns), ctypes.addressof(strips))
        self.shape = weight.shape[0], weight.shape[1]
        self._library = library
        self.form, data = _packed(weight.detach(), _Panel(columns.value, strips.value), at_least)
        self._data = pages.keep(data.view(torch.uint8))

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def projection(self, bias_address: int | None) -> CProjection:
        """For C; this weight must outlive its use."""
        outs, k = self.shape
        return CProjection(kind=KINDS[self.form], outs=outs, k=k, data=self._data.data_ptr(), bias=bias_address)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # [..., k] float32 → [..., out]
        """A row's bits depend on that row and the numbers of the weight, not on its form or on other rows."""
        outs, k = self.shape
        rows = x.reshape(-1, k)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = rows.new_empty(len(rows), outs)
        weight = self.projection(None if bias is None else bias.data_ptr())
        self._library.pd_linear(
            ctypes.addressof(weight), rows.data_ptr(), rows.stride(0), y.data_ptr(), len(rows)
        )  # fmt: skip
        return y.view(*x.shape[:-1], outs)


def _packed(weight: Tensor, panel: _Panel, at_least: Form | None) -> tuple[Form, Tensor]:
    bits = {"nibbles": 4, "bytes": 8, "bfloat16": 16, "float16": 16, "float32": 32, None: 0}
    for form, group in GROUPINGS:
        if bits[form] >= bits[at_least] and (packed := _grouped_panels(weight, panel, form, group)) is not None:
            return form, packed
    plain: tuple[tuple[Form, torch.dtype], ...] = (("bfloat16", torch.bfloat16), ("float16", torch.float16))
    for form, dtype in plain:
        if bits[form] >= bits[at_least] and _is_exactly(weight, dtype):
            return form, _plain_panels(weight.to(dtype), panel)
    return "float32", _plain_panels(weight, panel)


def _is_exactly(weight: Tensor, dtype: torch.dtype) -> bool:
    parts = torch.split(weight, ROWS_AT_ONCE)
    return all(torch.equal(part.to(dtype).float(), part) and bool(part.isfinite().all()) for part in parts)


def _grouped_panels(
    weight: Tensor, panel: _Panel, form: Form, group: Callable[[Tensor], Grouped]
) -> Tensor | None:  # uint8 [panels, groups, strips, bytes]
    """None unless they give the very numbers back. (A zero may lose its sign, which no sum of products shows.)"""
    found = []
    for part in torch.split(weight, panel.outs * (ROWS_AT_ONCE // panel.outs)):
        # What fills the last group up is never multiplied, but must not widen its range.
        filled = F.pad(part[None], (0, -part.shape[1] % GROUP), mode="replicate")[0]
        groups = filled.view(len(part), -1, GROUP)
        grouped = group(groups)
        if not torch.equal(grouped.floats(), groups):
            return None
        found.append(_group_bytes(grouped, panel, form))
    return torch.cat(found)


def _group_bytes(grouped: Grouped, panel: _Panel, form: Form) -> Tensor:  # uint8 [panels, groups, strips, bytes]
    outs, groups, _ = grouped.values.shape
    fill = -outs % panel.outs
    values = F.pad(grouped.values, (0, 0, 0, 0, 0, fill)).view(-1, panel.strips, panel.columns, groups, GROUP)
    if form == "nibbles":  # a word of every column
        places = values.view(*values.shape[:4], GROUP // WORD, WORD).to(torch.int32)
        values = (places << torch.arange(0, 4 * WORD, 4, dtype=torch.int32)).sum(dim=5, dtype=torch.int32)
    halves = [grouped.scales] if grouped.minima is None else [grouped.scales, grouped.minima]
    terms = F.pad(torch.stack(halves), (0, 0, 0, fill)).view(len(halves), -1, panel.strips, panel.columns, groups)
    parts = terms.permute(1, 4, 2, 0, 3), values.permute(0, 3, 1, 4, 2)  # [panels, groups, strips, …, columns]
    return torch.cat([part.contiguous().view(torch.uint8).flatten(3) for part in parts], dim=3)


def _plain_panels(weight: Tensor, panel: _Panel) -> Tensor:  # [out, k] → [panels, groups, strips, GROUP, columns]
    filled = F.pad(weight, (0, -weight.shape[1] % GROUP, 0, -len(weight) % panel.outs))
    groups = filled.view(-1, panel.strips, panel.columns, filled.shape[1] // GROUP, GROUP)
    return groups.permute(0, 3, 1, 4, 2).contiguous()
