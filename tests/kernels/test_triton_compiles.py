"""The GPU kernels become machine code, which the interpreter says nothing about; no GPU is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANY_GPU_BYTES = 99 << 10  # the shared memory that a program may have on every GPU since Ampere
H100_BYTES = 227 << 10


def test_kernels_compile_for_every_architecture_and_fit_its_shared_memory(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "tests/kernels/compile_triton.py", "90", "80", "100"],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    shared_bytes = {(arch, name): size for arch, name, size in map(json.loads, done.stdout.splitlines())}
    assert {arch for arch, _ in shared_bytes} == {80, 90, 100}
    assert max(shared_bytes.values()) <= H100_BYTES
    assert max(size for (_, name), size in shared_bytes.items() if name in ("decode", "prefill")) <= ANY_GPU_BYTES
