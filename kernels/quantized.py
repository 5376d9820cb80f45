"""Weights in int8 or int4, and their products with float32 rows: `native/quantized.c`, or torch by definition.

    int8  one scale for every output: weight = scale * value, values -127 to 127
    int4  a scale and a minimum for every group of 32 along K: weight = minimum + scale * value, values 0 to 15

Activations become int8 too, each row in groups of 32, by their largest magnitudes: one large value costs precision in
its group only, and a row never depends on its neighbours. torch has an integer product (`torch._int_mm`), for one scale
a row; with the conversions around it, it takes 1.0 to 1.9 times as long at 256 to 1 rows (Zen 5), so it is not used.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .pages import Pages

Quantization = Literal["int8", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

GROUP = 32  # as in native/quantized.h
LEAST_RANGE = 1e-36  # a row whose values all stay below it counts as zeros
MOST_HALF = 65504.0
STEP = 4  # values along K that the kernels in C take at once


@dataclass(frozen=True)
class QuantizedWeight:
    """What a weight became, in the order of the weight."""

    kind: Quantization
    values: Tensor  # int8: [out, k] int8; int4: [out, groups, GROUP] uint8, the last group filled up
    scales: Tensor  # int8: [out] float32; int4: [out, groups] float16
    minima: Tensor | None  # int4: [out, groups] float16
    k: int

    def dequantized(self) -> Tensor:  # [out, k] float32
        if self.minima is None:
            return self.values.float() * self.scales[:, None]
        return (self.minima[..., None].float() + self.scales[..., None].float() * self.values).flatten(1)[:, : self.k]

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # [..., k] float32 → [..., out]
        y = product_by_definition(x.reshape(-1, self.k), self)
        return (y if bias is None else y + bias).view(*x.shape[:-1], y.shape[1])


def quantize(weight: Tensor, kind: Quantization) -> QuantizedWeight:  # weight: [out, k] float32
    """The nearest values. A weight that is not finite makes its output NaN, as it would have been."""
    if kind == "int8":
        scales = weight.abs().amax(dim=1) / 127.0
        values = (weight / _divisor(scales)[:, None]).round_().nan_to_num_().to(torch.int8)
        return QuantizedWeight(kind, values, scales, None, weight.shape[1])
    outs, k = weight.shape
    # What fills the last group up is multiplied by zeros, but must not widen its range.
    groups = F.pad(weight[None], (0, -k % GROUP), mode="replicate")[0].view(outs, -1, GROUP)
    least, most = torch.aminmax(groups, dim=-1)
    minima = least.clamp(-MOST_HALF, MOST_HALF).half()
    steps = ((most - minima.float()) / 15.0).clamp(0.0, MOST_HALF).half()
    values = ((groups - minima[..., None].float()) / _divisor(steps.float())[..., None]).round_().clamp_(0.0, 15.0)
    return QuantizedWeight(kind, values.nan_to_num_().to(torch.uint8), steps, minima, k)


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def quantize_rows(
    x: Tensor,  # [rows, k]
) -> tuple[Tensor, Tensor]:  # int8 [rows, groups, GROUP], float32 [rows, groups]
    """Activations as the kernels in C see them. The scale of a group that is not finite is NaN."""
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -(-x.shape[1] // GROUP), GROUP)
    ranges = groups.abs().amax(dim=2)
    usable = (ranges >= LEAST_RANGE) & ranges.isfinite()
    most = x.new_tensor(127.0)  # a tensor: torch turns a number over a tensor into a product, which rounds twice
    factors = torch.where(usable, most / ranges, 0.0)
    values = torch.where(usable[..., None], (groups * factors[..., None]).round_(), 0.0).to(torch.int8)
    scales = torch.where(usable, ranges / most, torch.where(ranges < LEAST_RANGE, 0.0, torch.nan))
    return values, scales


def product_by_definition(x: Tensor, weight: QuantizedWeight) -> Tensor:  # [rows, k] → [rows, out]
    """x @ weight.T of the quantised numbers: what runs without kernels in C, and the reference up to rounding."""
    values, scales = quantize_rows(x)
    return F.linear((values * scales[..., None]).flatten(1)[:, : weight.k], weight.dequantized())


class CProjection(ctypes.Structure):
    """`Projection` of native/linear.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "outs", "k")),
        *((name, ctypes.c_void_p) for name in ("data", "scales", "bias")),
    )


class PackedWeight:
    """A quantised weight in the order in which the kernels in C read it; next to those packed before, in `pages`."""

    def __init__(self, weight: QuantizedWeight, library: ctypes.CDLL, pages: Pages) -> None:
        columns, strips = ctypes.c_int64(), ctypes.c_int64()
        library.pd_panel(ctypes.addressof(columns), ctypes.addressof(strips))
        self.kind = weight.kind
        self.shape = len(weight.values), weight.k
        self._library = library
        fill = -len(weight.values) % (columns.value * strips.value)  # outputs that are missing in the last panel
        self._scales: Tensor | None = None
        if weight.minima is None:
            data = _panels_int8(F.pad(weight.values, (0, 0, 0, fill)), columns.value, strips.value)
            self._scales = F.pad(weight.scales, (0, fill))
        else:
            halves = F.pad(torch.stack([weight.scales, weight.minima]), (0, 0, 0, fill))
            data = _panels_int4(F.pad(weight.values, (0, 0, 0, 0, 0, fill)), halves, columns.value, strips.value)
        self._data = pages.keep(data)

    def projection(self, bias_address: int | None) -> CProjection:
        """For C; this weight must outlive its use."""
        return CProjection(
            kind=8 if self.kind == "int8" else 4, outs=self.shape[0], k=self.shape[1], data=self._data.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(), bias=bias_address,
        )  # fmt: skip

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # [..., k] float32 → [..., out]
        rows = x.reshape(-1, self.shape[1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = rows.new_empty(len(rows), self.shape[0])
        scratch = torch.empty(scratch_bytes(len(rows), self.shape[1]), dtype=torch.uint8)
        projection = self.projection(None if bias is None else bias.data_ptr())
        self._library.pd_quantized_linear(
            ctypes.addressof(projection), rows.data_ptr(), rows.stride(0), y.data_ptr(), len(rows), scratch.data_ptr()
        )
        return y.view(*x.shape[:-1], self.shape[0])


def scratch_bytes(rows: int, k: int) -> int:
    """What the kernels need for quantised rows of this size (native/quantized.h)."""
    return rows * 4 * (k + -k % GROUP)


def _panels_int8(
    values: Tensor,  # [out, k] int8
    columns: int,
    strips: int,
) -> Tensor:  # uint8 [panels, groups, strips, steps, columns, STEP]
    shifted = (values.to(torch.int16) + 128).to(torch.uint8)
    padded = F.pad(shifted, (0, -values.shape[1] % GROUP))
    steps = padded.view(-1, strips, columns, padded.shape[1] // GROUP, GROUP // STEP, STEP)
    return steps.permute(0, 3, 1, 4, 2, 5).contiguous()


def _panels_int4(
    values: Tensor,  # [out, groups, GROUP] uint8
    halves: Tensor,  # [2, out, groups] float16: scales, minima
    columns: int,
    strips: int,
) -> Tensor:  # uint8 [panels, groups, strips, bytes]: scales and minima of the columns, then pairs of steps
    groups = values.shape[1]
    steps = values.view(-1, strips, columns, groups, GROUP // (2 * STEP), 2, STEP)
    pairs = steps[..., 0, :] | steps[..., 1, :] << 4  # [panels, strips, columns, groups, pairs, STEP]
    scales = halves.view(2, -1, strips, columns, groups).permute(1, 4, 2, 0, 3).contiguous()
    parts = scales.view(torch.uint8), pairs.permute(0, 3, 1, 4, 2, 5)
    return torch.cat([part.reshape(len(steps), groups, strips, -1) for part in parts], dim=3)
