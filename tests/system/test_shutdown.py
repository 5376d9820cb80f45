"""However `pdserve up` ends, nothing of it goes on running."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.harness import System, eventually
from tests.system.tiny_model import random_prompt

pytestmark = pytest.mark.timeout(120, method="signal")


@pytest.fixture
def system(tiny: Path) -> Iterator[System]:
    with System(tiny, "--kv-blocks", 512, "--prefill-kv-blocks", 512) as running:
        yield running


def start_long_request(system: System, pool: ThreadPoolExecutor) -> None:
    """Leaves a request running that would take many seconds."""
    pool.submit(system.client.complete, random_prompt(1, 50), max_tokens=6000, ignore_eos=True)
    eventually(system.held_blocks, 30, "the request is running")


def test_interrupt_stops_everything_cleanly_in_the_middle_of_a_request(system: System) -> None:
    assert len(system.processes()) >= 4
    eventually(lambda: f":{system.port}" in system.stdout, 5, "the user is told where it listens")
    eventually(lambda: "curl" in system.stdout, 5, "and how to ask")
    with ThreadPoolExecutor(1) as pool:
        start_long_request(system, pool)
        result = system.stop(signal.SIGINT)
    assert result.code == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "killing" not in result.stderr, "every process stopped when it was asked to"


def test_nothing_outlives_a_killed_supervisor(tiny: Path) -> None:
    system = System(tiny, "--kv-blocks", 512, "--prefill-kv-blocks", 512)
    try:
        system.wait_ready(1, 1)
        system.send_signal(signal.SIGKILL)
        assert system.stop().code == -signal.SIGKILL
    finally:
        system.kill_all()
