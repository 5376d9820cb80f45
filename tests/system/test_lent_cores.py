"""Workers compute on each other's idle cores: the text stays the same, and a killed neighbour is no obstacle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.kernels.library import native
from tests.exact.reference import Reference
from tests.system.harness import System, eventually
from tests.system.tiny_model import load_tiny_llama, random_prompt, write_tiny_llama

pytestmark = [
    pytest.mark.timeout(300, method="signal"),
    pytest.mark.skipif(
        not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2 or native() is None,
        reason="needs two cores and the kernels in C",
    ),
]

LEASED = "pdserve_leased_core_seconds_total"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with layers wide enough to be shared out."""
    return write_tiny_llama(tmp_path_factory.mktemp("wide") / "wide", seed=3, hidden_size=256)


@pytest.fixture(scope="module")
def reference(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(lambda: load_tiny_llama(wide), "wide", tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def system(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """With a board of its own: to this system the rest of the machine does not exist."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_CORE_BOARD", str(tmp_path_factory.mktemp("board") / "board"))
        flags = ("--local-prefill", "never", "--no-prefix-caching", "--kv-blocks", 256, "--prefill-kv-blocks", 256)
        with System(wide, *flags, "--check-invariants") as running:
            yield running


def ask_until_leased(system: System, reference: Reference, role: str) -> None:
    """Repeat one request, whose text must not change, until a worker of this role has had help."""
    prompt = random_prompt(1, 400)
    expected = reference.output(prompt, 24, ignore_eos=True)
    before = system.metric(LEASED, role=role)

    def leased() -> bool:
        answer = system.client.complete(prompt, max_tokens=24, temperature=0, ignore_eos=True)
        assert answer.token_ids == expected
        return system.metric(LEASED, role=role) > before

    eventually(leased, WAIT_S, f"a {role} worker computes on its neighbour's core")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_text_is_the_same_on_a_neighbours_core(system: System, reference: Reference, role: str) -> None:
    ask_until_leased(system, reference, role)
    assert system.metric("pdserve_compute_threads", role=role) in (1, 2)
    system.assert_idle(2.0)


@pytest.mark.parametrize(("killed", "helped"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_killed_neighbours_core_is_lent_again_by_the_next(
    system: System, reference: Reference, killed: str, helped: str
) -> None:
    old = system.pids(killed)[f"{killed}-0"]
    os.kill(old, signal.SIGKILL)
    eventually(
        lambda: system.pids(killed).get(f"{killed}-0", old) != old,
        WAIT_S,
        f"the {killed} worker is back under its name",
    )
    system.wait_ready(1, 1)
    ask_until_leased(system, reference, helped)
    system.assert_idle(2.0)
