"""The largest logit of every row: all that a greedy step wants of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .library import native


def largest(x: Tensor) -> tuple[list[float], list[int]]:  # [rows, width], width > 0
    """Each row's largest number and the first place where it stands. A row with a NaN has NaN, and any place."""
    library = native() if x.is_cpu and x.dtype == torch.float32 and x.stride(1) == 1 else None
    if library is None:
        values, places = x.max(dim=-1)
        return values.tolist(), places.tolist()
    values, places = torch.empty(len(x)), torch.empty(len(x), dtype=torch.int64)
    library.pd_largest(x.data_ptr(), x.stride(0), len(x), x.shape[1], values.data_ptr(), places.data_ptr())
    return values.tolist(), places.tolist()
