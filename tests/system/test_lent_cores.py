"""Workers compute on each other's idle cores: the text stays the same, and a killed neighbour is no obstacle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    system.assert_idle()


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
    system.assert_idle()


@pytest.fixture
def wishing(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    """Its streams would have a token in less time than is possible."""
    monkeypatch.setenv("PDSERVE_CORE_BOARD", str(tmp_path / "board"))
    flags = ("--local-prefill", "never", "--no-prefix-caching", "--kv-blocks", 512, "--prefill-kv-blocks", 512)
    with System(wide, *flags, "--itl-slo-ms", 0.1, "--check-invariants") as running:
        yield running


def test_text_is_the_same_where_streams_ask_for_the_core_that_computes_prompts(
    wishing: System, reference: Reference
) -> None:
    asks = [(random_prompt(2, 20), 120), (random_prompt(3, 30), 100), (random_prompt(4, 900), 2)]
    expected = [reference.output(prompt, tokens, ignore_eos=True) for prompt, tokens in asks]

    def text(which: int) -> list[int]:
        prompt, tokens = asks[which]
        answer = wishing.client.complete(prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
        return answer.token_ids

    def stood_aside() -> bool:
        with ThreadPoolExecutor(6) as pool:
            whiches = [0, 1, 2, 2, 2, 2]
            assert list(pool.map(text, whiches)) == [expected[which] for which in whiches]
        return wishing.metric("pdserve_stood_aside_seconds_total", role="prefill") > before

    before = 0.0
    for _ in range(3):
        eventually(stood_aside, WAIT_S, "a prefill worker stands aside")
        before = wishing.metric("pdserve_stood_aside_seconds_total", role="prefill")
    assert wishing.metric("pdserve_steps_asking_total", role="decode") > 0
    wishing.assert_idle()


def test_without_an_slo_nobody_asks(system: System, reference: Reference) -> None:
    prompts = [random_prompt(5, 900), random_prompt(6, 20)] * 3
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda prompt: system.client.complete(prompt, max_tokens=40, ignore_eos=True), prompts))
    system.assert_idle()
    assert system.metric("pdserve_steps_asking_total", role="decode") == 0
    assert system.metric("pdserve_stood_aside_seconds_total", role="prefill") == 0
