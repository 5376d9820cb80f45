"""Norms, rotary positions and gates on the device, against torch in float64 on the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.decoder_layer import Norm
from ..kernels.rows import gated_rows, normed_rows, turn_heads
from .device_report import Check, Setting

ROWS, DRY_ROWS = 33, 2
SIZES, DRY_SIZES = (4096, 2048, 100, 1), (100, 1)  # of a row
HEADS = ((32, 8, 128, 128), (16, 4, 96, 32), (3, 1, 10, 6))  # of q, of k, their size, of which is turned
DRY_HEADS = HEADS[2:]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of values about 1 in size


def run(setting: Setting) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(3)
    rows = DRY_ROWS if setting.dry else ROWS
    for dtype, tolerance in TOLERANCES.items():
        worst = {"norms": 0.0, "gates": 0.0, "rotary positions": 0.0}
        for size in DRY_SIZES if setting.dry else SIZES:
            x, weight = torch.randn(rows, 2 * size, generator=generator), torch.rand(size, generator=generator)
            worst["norms"] = max(worst["norms"], _norms(x.to(dtype), weight.to(dtype), setting))
            worst["gates"] = max(worst["gates"], _gates(x.to(dtype), setting))
        for q_heads, k_heads, head_dim, rotary in DRY_HEADS if setting.dry else HEADS:
            qkv = torch.randn(rows, q_heads + 2 * k_heads, head_dim, generator=generator).to(dtype)
            angles = torch.randn(rows, rotary // 2, generator=generator).repeat(1, 2)
            for normed in (False, True):
                turned = _turned(qkv, (q_heads, k_heads), angles.to(dtype), normed, setting)
                worst["rotary positions"] = max(worst["rotary positions"], turned)
        for name, difference in worst.items():
            yield Check(
                f"{name}, {str(dtype).removeprefix('torch.')}: equal float64", ok=difference <= tolerance,
                value=difference, target=f"<= {tolerance:g}",
            )  # fmt: skip


def _difference(found: Tensor, expected: Tensor) -> float:
    """Infinite where either is not a number."""
    largest = (found.cpu().double() - expected).abs().max().item()
    return largest if largest == largest else float("inf")


def _norms(wide: Tensor, weight: Tensor, setting: Setting) -> float:
    half = len(weight)  # of a row: the stride is another than the size
    with setting.triton():
        found = normed_rows(wide.to(setting.device)[:, :half], Norm(weight.to(setting.device), 1e-5))
    return _difference(found, normed_rows(wide.double()[:, :half], Norm(weight.double(), 1e-5)))


def _gates(joined: Tensor, setting: Setting) -> float:
    with setting.triton():
        found = gated_rows(joined.to(setting.device))
    return _difference(found, gated_rows(joined.double()))


def _turned(qkv: Tensor, heads: tuple[int, int], angles: Tensor, normed: bool, setting: Setting) -> float:
    def turn(device: torch.device, dtype: torch.dtype) -> Tensor:
        values = qkv.to(device, dtype, copy=True)
        cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        weights = torch.linspace(0.5, 1.5, qkv.shape[2]).to(qkv.dtype).to(device, dtype)
        norms = (Norm(weights, 1e-6), Norm(weights.flip(0), 1e-3)) if normed else (None, None)
        turn_heads(values, *heads, cos, sin, *norms)
        return values

    with setting.triton():
        found = turn(setting.device, qkv.dtype)
    return _difference(found, turn(torch.device("cpu"), torch.float64))
