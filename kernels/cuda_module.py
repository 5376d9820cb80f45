"""The kernels in CUDA C++ (`cuda/`): compiled by NVRTC for the device at hand, launched through CuPy on torch's stream.

They are compiled here and not by CuPy's RawModule, which adds options of its own (-ftz=true): what runs is what the
tests compile. It takes about a second a process, so nothing is kept on disk.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("cuda")
# No contraction: `rotary.cu` rounds where the models do. The copies have no arithmetic that could suffer.
OPTIONS = ("--std=c++17", "--fmad=false")

Shape = tuple[int, int]


class _TorchStream:
    """One of torch's streams in the protocol by which CuPy takes in those of others."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


@cache
def cupy() -> Any:
    """CuPy, which takes a while to import; None (and one line in the log) where it cannot be."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        log.warning("no kernels in CUDA C++, torch does their work, slower: CuPy cannot be imported (%s)", error)
        return None


def compile_cubin(source: Path, architecture: str, options: Sequence[str] = OPTIONS) -> tuple[bytes, str]:
    """(machine code for an architecture such as sm_90, what the compiler remarked). Needs no device."""
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(source.read_text(encoding="utf-8"), source.name, [], [])
    try:
        try:
            nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", *options))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{source.name} for {architecture}: {error}\n{nvrtc.getProgramLog(program)}") from None
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


@cache
def _kernel(device_index: int, file: str, name: str) -> Any:
    return _module(device_index, file).get_function(name)


@cache
def _module(device_index: int, file: str) -> Any:
    """One file of `cuda/`, loaded on the current device, which is `device_index`."""
    major, minor = torch.cuda.get_device_capability(device_index)
    cubin, _ = compile_cubin(SOURCES / f"{file}.cu", f"sm_{major}{minor}")
    module = cupy().cuda.function.Module()
    module.load(cubin)
    return module


@cache
def _stream(pointer: int) -> Any:
    return cupy().cuda.Stream.from_external(_TorchStream(pointer))


def launch(
    file: str, name: str, device: torch.device, grid: Shape, block: Shape, arguments: Sequence[int]
) -> None:  # fmt: skip
    """Run a kernel of `file` over `grid` blocks of `block` threads; every argument is a 64-bit integer or address."""
    int64 = cupy().int64
    with torch.cuda.device(device):
        kernel = _kernel(torch.cuda.current_device(), file, name)
        with _stream(torch.cuda.current_stream().cuda_stream):
            kernel((*grid, 1), (*block, 1), tuple(int64(argument) for argument in arguments))
