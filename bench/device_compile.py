"""The kernels in CUDA C++ compile for the devices we name, without a remark. Needs CuPy and NVRTC, but no device."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..kernels.cuda_module import OPTIONS, SOURCES, compile_cubin
from .device_report import Check, Setting

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
MACHINE_CODE = b"\x7fELF"


def run(setting: Setting) -> Iterator[Check]:
    for source in sorted(SOURCES.glob("*.cu")):
        for architecture in ARCHITECTURES:
            started = time.perf_counter()
            cubin, remarks = compile_cubin(source, architecture, OPTIONS)
            taken = time.perf_counter() - started
            ok = cubin.startswith(MACHINE_CODE) and not remarks
            name = f"{source.name} compiles for {architecture}"
            yield Check(name, ok, taken, "s", note=" ".join(remarks.split())[:200])
