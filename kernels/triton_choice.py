"""Which tensors Triton's kernels are taken for: those on a GPU; while `interpreting`, those on the CPU too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_interpreting = False


def in_triton(x: Tensor) -> bool:
    return x.is_cuda or _interpreting


@contextmanager
def interpreting() -> Iterator[None]:
    """Needs TRITON_INTERPRET=1 in the environment since before Triton, or whatever imports it, was imported."""
    global _interpreting
    _interpreting = True
    try:
        yield
    finally:
        _interpreting = False
