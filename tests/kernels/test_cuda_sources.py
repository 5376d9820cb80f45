"""Every kernel in CUDA C++ compiles for the devices we name, without a remark. Needs NVRTC, but no device."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from pdserve.kernels.cuda_module import OPTIONS, SOURCES, compile_cubin

pytestmark = pytest.mark.skipif(find_spec("cupy_backends") is None, reason="CuPy, which brings NVRTC, is not installed")

STRICT = (*OPTIONS, "--warning-as-error=all-warnings")
FILES = sorted(SOURCES.glob("*.cu"))


def test_there_are_kernels() -> None:
    assert FILES


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_kernel_compiles_for_every_architecture_without_a_warning(path: Path, architecture: str) -> None:
    cubin, remarks = compile_cubin(path, architecture, STRICT)
    assert cubin.startswith(b"\x7fELF")
    assert remarks == ""


@pytest.mark.parametrize("flaw", ["int unused;", "int x = 1.5 + nothing;"])
def test_a_flaw_is_an_error_that_names_the_file(tmp_path: Path, flaw: str) -> None:
    path = tmp_path / "flawed.cu"
    path.write_text(f'extern "C" __global__ void kernel() {{ {flaw} }}')
    with pytest.raises(RuntimeError, match=r"flawed\.cu for sm_90"):
        compile_cubin(path, "sm_90", STRICT)
