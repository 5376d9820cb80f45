"""The libraries of JavaScript: each file of js/ runs under node's own test runner against the same system."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import KEY, MODEL, QUESTION, TOKENS, Served

pytestmark = pytest.mark.timeout(200, method="signal")

FOLDER = Path(__file__).parent / "js"
FILES = sorted(path.name for path in FOLDER.glob("*.test.js"))


@pytest.mark.parametrize("name", FILES)
def test_every_test_of_the_file_passes(served: Served, golden: str, name: str) -> None:
    settings = {
        "PDSERVE_BASE_URL": served.base_url,
        "PDSERVE_KEY": KEY,
        "PDSERVE_MODEL": MODEL,
        "PDSERVE_QUESTION": QUESTION,
        "PDSERVE_GOLDEN": golden,
        "PDSERVE_MAX_TOKENS": str(TOKENS),
    }
    command = ("node", "--test", "--test-reporter=tap", name)
    done = subprocess.run(
        command, cwd=FOLDER, env=os.environ | settings, capture_output=True, text=True, timeout=180, check=False
    )
    counts = {word: int(count) for word, count in re.findall(r"^# (pass|fail|skipped) (\d+)$", done.stdout, re.M)}
    written = len(re.findall(r"^test\(", (FOLDER / name).read_text(), re.M))
    assert counts == {"pass": written, "fail": 0, "skipped": 0}, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0
