"""The CUDA kernels of cache_ops compiled for this processor: what a device would copy, checked without one."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from pdserve.kernels.cuda_module import SOURCES, Shape

KERNELS = {
    "cache_ops": [f"{name}_{word}" for name in ("gather", "scatter", "copy_block") for word in (1, 2, 4, 8, 16)],
    "rotary": [f"rotate_and_write_{dtype}" for dtype in ("float32", "float16", "bfloat16")],
}
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror", "-x", "c++")
NUM_ARGUMENTS = 32


class HostKernels:
    """Has the `launch` of `cuda_module`."""

    def __init__(self, directory: Path, sources: Path = SOURCES) -> None:
        self._libraries = {file: self._compile(directory, sources, file) for file in KERNELS}

    @staticmethod
    def _compile(directory: Path, sources: Path, file: str) -> ctypes.CDLL:
        code = f'#include "{Path(__file__).with_name("cuda_host.h")}"\n#include "{sources}/{file}.cu"\n' + "".join(
            f'extern "C" void run_{name}(const long long *shape, const long long *arguments)'
            f" {{ run({name}, shape, arguments); }}\n"
            for name in KERNELS[file]
        )
        path = directory / f"{file}.so"
        done = subprocess.run(
            ["g++", *FLAGS, "-o", str(path), "-"], input=code, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(path))

    def launch(
        self, file: str, name: str, device: torch.device, grid: Shape, block: Shape, arguments: Sequence[int]
    ) -> None:  # fmt: skip
        assert device.type == "cpu"
        assert block[0] * block[1] <= 1024
        assert grid[1] < 65536
        library = self._libraries[file]
        numbers = (ctypes.c_longlong * NUM_ARGUMENTS)(*arguments)
        library[f"run_{name}"]((ctypes.c_longlong * 4)(*grid, *block), numbers)
        assert ctypes.c_longlong.in_dll(library, "misaligned").value == 0, f"{name}: a device would refuse the address"
