"""Processes are killed with SIGKILL; requests go on, and nothing is held for the dead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.system.harness import Gateway, Launch, System, eventually, free_port
from tests.system.tiny_model import random_prompt, write_tiny_llama

pytestmark = pytest.mark.timeout(300, method="signal")

RESTART_TIMEOUT_S = 60.0
LONG_PROMPT_TOKENS = 6000
LONG_OUTPUT_TOKENS = 1200
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights again, with enough layers that a long prompt takes seconds."""
    return write_tiny_llama(tmp_path_factory.mktemp("slow") / "slow", seed=9, num_layers=12)


@pytest.fixture(scope="module")
def system(slow_model: Path) -> Iterator[System]:
    """1 prefill and 2 decode workers that remember nothing, so that a second run computes everything again."""
    flags = ("--local-prefill", "never", "--no-prefix-caching", "--chunk-tokens", 64, "--check-invariants")
    with System(slow_model, *flags, "--kv-blocks", 512, "--prefill-kv-blocks", 512, decode=2) as running:
        yield running


def kill_worker(system: System, role: str, name: str) -> None:
    os.kill(system.pids(role)[name], signal.SIGKILL)


def assert_restarted_and_idle(system: System, role: str, old: dict[str, int]) -> None:
    def restarted() -> bool:
        now = system.pids(role)
        return now.keys() == old.keys() and now != old

    eventually(restarted, RESTART_TIMEOUT_S, f"the {role} worker is back under its name")
    system.wait_ready(1, 2, RESTART_TIMEOUT_S)
    system.assert_idle()


def test_prefill_worker_killed_while_idle_is_replaced_and_requests_go_on(system: System) -> None:
    prompt = random_prompt(1, 300)
    expected = system.client.complete(prompt, max_tokens=20, **GREEDY)
    old = system.pids("prefill")
    kill_worker(system, "prefill", "prefill-0")
    assert system.client.complete(prompt, max_tokens=20, **GREEDY).choices == expected.choices
    assert_restarted_and_idle(system, "prefill", old)
    assert system.client.complete(prompt, max_tokens=20, **GREEDY).choices == expected.choices


def test_prefill_worker_killed_in_the_middle_of_a_transfer_costs_no_request(system: System) -> None:
    prompt = random_prompt(2, LONG_PROMPT_TOKENS)
    expected = system.client.complete(prompt, max_tokens=20, **GREEDY)
    system.assert_idle()  # all that this has moved is counted
    old, retries = system.pids("prefill"), system.metric("pdserve_retries_total")

    # Series of the worker that is about to die vanish with it; the decode side counts what arrived.
    def moved() -> float:
        return system.metric("pdserve_transfer_bytes_total", role="decode")

    before = moved()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(system.client.complete, prompt, max_tokens=20, **GREEDY)
        eventually(lambda: moved() > before, 30, "KV is on its way")
        kill_worker(system, "prefill", "prefill-0")
        assert not answer.done(), "the worker died too late to matter"
        assert answer.result(timeout=120).choices == expected.choices
    assert system.metric("pdserve_retries_total") > retries
    assert_restarted_and_idle(system, "prefill", old)


def test_stream_goes_on_with_the_same_text_when_its_decode_worker_is_killed(system: System) -> None:
    prompt = random_prompt(3, 200)
    ask = {"max_tokens": LONG_OUTPUT_TOKENS, **GREEDY}
    expected = system.client.complete(prompt, **ask)
    system.assert_idle()  # what holds blocks from now on runs the stream
    old, retries = system.pids("decode"), system.metric("pdserve_retries_total")

    def holder() -> str | None:
        """The decode worker that runs the stream."""
        held = {name: system.metric("pdserve_kv_blocks", state="held", worker=name) for name in old}
        return next((name for name, blocks in held.items() if blocks), None)

    text, ids = "", []
    killed = False
    with system.client.events("/v1/completions", prompt=prompt, **ask) as events:
        for event in events:
            (choice,) = event["choices"]
            text += choice["text"]
            ids += choice["token_ids"]
            if len(ids) >= 20 and not killed:
                name = eventually(holder, 10, "the stream holds blocks somewhere")
                kill_worker(system, "decode", name)
                killed = True
                assert len(ids) < LONG_OUTPUT_TOKENS // 2
    assert killed
    assert ids == expected.token_ids
    assert text == expected.text
    assert system.metric("pdserve_retries_total") > retries, "the worker died too late to matter"
    assert_restarted_and_idle(system, "decode", old)


def test_workers_drop_the_requests_of_a_killed_gateway_and_register_with_the_next(
    slow_model: Path, runtime: Path
) -> None:
    control, port = f"ipc://{runtime}/control", free_port()

    def start_gateway() -> Gateway:
        flags = ("--model", slow_model, "--listen", control, "--local-prefill", "never")
        return Gateway("gateway", *flags, model="slow", port=port, runtime=runtime)

    def start_worker(role: str) -> Launch:
        flags = ("--gateway", control, "--name", f"{role}-0", "--model", slow_model, "--kv-blocks", 512)
        return Launch(role, *flags, runtime=runtime)

    prompt, ask = random_prompt(4, 100), {"max_tokens": 16, **GREEDY}
    with ExitStack() as stack:
        stack.enter_context(start_worker("prefill"))
        stack.enter_context(start_worker("decode"))
        first = start_gateway()
        stack.callback(first.client.close)
        stack.callback(first.kill_all)
        first.wait_ready(1, 1)
        pids = first.pids("prefill") | first.pids("decode")
        expected = first.client.complete(prompt, **ask)
        with first.client.events("/v1/completions", prompt=prompt, max_tokens=4000, **GREEDY) as events:
            for _ in range(20):
                next(events)
            first.kill_all()
            with pytest.raises(httpx.TransportError):
                list(events)
        second = stack.enter_context(start_gateway())
        second.wait_ready(1, 1, RESTART_TIMEOUT_S)
        second.assert_idle()
        assert second.pids("prefill") | second.pids("decode") == pids, "the workers lived on"
        assert second.client.complete(prompt, **ask).choices == expected.choices
