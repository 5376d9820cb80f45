"""The GPU kernels, to be run on the CPU by Triton's interpreter; skips whoever imports this where there is no Triton.

Triton looks at TRITON_INTERPRET where a kernel is defined. tests/conftest.py imports Triton itself with it, and this
our kernels, while tests are collected, before any has run a model. Then the variable is gone again for whatever
other tests start. While kernels run it must be set once more: use `interpreting`.
"""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
try:
    pytest.importorskip("triton", reason="the GPU kernels need Triton, to be interpreted too")
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction

    from pdserve.kernels import attention_triton as attention_triton
    from pdserve.kernels import attention_triton_decode as attention_triton_decode
    from pdserve.kernels import rows_triton as rows_triton
    from pdserve.kernels import triton_tuning as triton_tuning
finally:
    del os.environ["TRITON_INTERPRET"]

assert isinstance(standard.sum, InterpretedFunction), "Triton was imported before tests/conftest.py did"
assert isinstance(attention_triton_decode.attend_splits, InterpretedFunction), "the GPU kernels were imported before"


@pytest.fixture
def interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
