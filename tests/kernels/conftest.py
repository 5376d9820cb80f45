"""The kernels in C at every instruction set that this machine can run."""

from __future__ import annotations

import ctypes
import shutil

import pytest

from pdserve.kernels.library import LEVEL_FLAGS, level, open_library

RUNNABLE = list(LEVEL_FLAGS)[list(LEVEL_FLAGS).index(level()) :]  # the best comes first, and all below it run too


@pytest.fixture(params=RUNNABLE, scope="session")
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    return open_library(request.param)
