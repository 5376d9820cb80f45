"""`linear`: matrix products of a few rows with a weight, the bulk of a decode step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import native

# Between one row and this many, torch is faster with the weight as the left operand (measured on Zen 1 and Zen 4).
MOST_SWAPPED_ROWS = 4


def linear(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None = None,  # [out]
) -> Tensor:  # [..., out]
    """x @ weight.T + bias.

    In float32 on the CPU, with the kernels in C, a row's bits depend on that row and the weight alone; they are never
    slower than torch there, however many the rows. Everything else is left to torch, which gives no such promise.
    """
    library = native() if runs_native(x, weight) else None
    if library is not None:
        out_features, in_features = weight.shape
        rows = x.reshape(-1, in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = rows.new_empty(len(rows), out_features)
        library.pd_linear(
            rows.data_ptr(), rows.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(), None, 0,
            y.data_ptr(), out_features, len(rows), out_features, in_features,
        )  # fmt: skip
        return y.view(*x.shape[:-1], out_features)
    if x.device.type == "cpu" and 2 <= x.numel() // x.shape[-1] <= MOST_SWAPPED_ROWS:
        y = (weight @ x.reshape(-1, x.shape[-1]).T).T.reshape(*x.shape[:-1], len(weight))
        return y if bias is None else y + bias
    return F.linear(x, weight, bias)


def runs_native(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels in C take these tensors, if there are such kernels."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )
