"""Settings of every test run: no network, one compute thread a process, no time limits on generated examples."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import hypothesis
import pytest

# Before anything imports torch or huggingface_hub; child processes inherit both.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton defines its own library for its interpreter if this is set when it is first imported, by whatever library.
# Processes that tests start do not inherit it. See tests/kernels/interpreted.py.
os.environ["TRITON_INTERPRET"] = "1"
with contextlib.suppress(ImportError):
    import triton  # noqa: F401
del os.environ["TRITON_INTERPRET"]

hypothesis.settings.register_profile("pdserve", deadline=None)
hypothesis.settings.load_profile("pdserve")

SYSTEM = Path(__file__).parent / "system"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole systems are started first and one after the other, by one runner, while the other does the rest."""
    items.sort(key=lambda item: SYSTEM not in item.path.parents)
    for item in items:
        if SYSTEM in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("system"))
