"""Workers and gateways leave a running system: what they hold is finished or moves, and no client sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.system.client import Answer
from tests.system.cluster import Cluster, cluster
from tests.system.harness import PDSERVE, Gateway, System, eventually
from tests.system.tiny_model import random_prompt

pytestmark = pytest.mark.timeout(300, method="signal")

LEAVE_TIMEOUT_S = 15.0
GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = {"max_tokens": 1000, **GREEDY}
VERY_LONG = {"max_tokens": 2000, **GREEDY}  # for longer than it takes to ask for something, and to see it begun


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="pds-", dir="/tmp") as runtime,
        cluster(tiny, Path(runtime), "gateway-0", "gateway-1", "prefill-0", "decode-0", "decode-1") as running,
    ):
        yield running


@pytest.fixture
def pair(shared: Cluster) -> Cluster:
    """Two gateways over one prefill and two decode workers, whatever the test before has ended of them."""
    for name, launch in [*shared.gateways.items(), *shared.workers.items()]:
        if not launch.running:
            shared.start(name)
    shared.wait_ready()
    return shared


def drain(worker: str, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", PDSERVE, "drain", worker, "--url", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def holder(gateway: Gateway) -> str | None:
    """The decode worker that runs something."""
    held = {name: gateway.metric("pdserve_kv_blocks", state="held", worker=name) for name in gateway.pids("decode")}
    return next((name for name, blocks in held.items() if blocks), None)


def retries(gateways: Iterable[Gateway], kind: str) -> float:
    return sum(gateway.metric("pdserve_retries_total", kind=kind) for gateway in gateways)


def stream(
    pool: ThreadPoolExecutor, gateway: Gateway, prompt: list[int], ask: dict[str, object] = LONG
) -> Future[Answer]:
    return pool.submit(gateway.client.stream, "/v1/completions", prompt=prompt, **ask)


def test_streams_of_a_drained_worker_move_from_both_gateways_and_it_leaves(pair: Cluster) -> None:
    first, second = pair.gateways.values()
    prompts = [random_prompt(seed, 100) for seed in range(4)]
    expected = [first.client.complete(prompt, **VERY_LONG) for prompt in prompts]
    first.assert_idle()  # who holds something from now on runs a stream
    before = {kind: retries((first, second), kind) for kind in ("drained", "failed", "decode_lost")}
    with ThreadPoolExecutor(8) as pool:
        answers = [stream(pool, (first, second)[i % 2], prompt, VERY_LONG) for i, prompt in enumerate(prompts)]
        name = eventually(lambda: holder(first), 20, "a decode worker is at it")
        other = {"decode-0": "decode-1", "decode-1": "decode-0"}[name]
        told = httpx.post(f"{second.url}/admin/drain/{name}", json={}, trust_env=False)
        assert told.status_code == 202, told.text
        assert pair.workers[name].wait(LEAVE_TIMEOUT_S).code == 0
        for answer, whole in zip(answers, expected, strict=True):
            got = answer.result(timeout=120)
            assert got.choices == whole.choices
            assert got.usage["completion_tokens"] == VERY_LONG["max_tokens"]
    more = {kind: retries((first, second), kind) - count for kind, count in before.items()}
    assert more.pop("drained") > 0
    assert not any(more.values()), more
    for gateway in (first, second):
        gateway.assert_idle()
        eventually(lambda gateway=gateway: list(gateway.pids("decode")) == [other], 5, "it is forgotten")


def test_last_decode_worker_finishes_its_stream_before_sigterm_ends_it(tiny: Path, runtime: Path) -> None:
    flags = ("--kv-blocks", 1024, "--drain-timeout-s", 200)
    with cluster(tiny, runtime, "gateway-0", "decode-0", worker_flags=flags) as running:
        gateway, worker = running.gateways["gateway-0"], running.workers["decode-0"]
        prompt = random_prompt(1, 50)
        expected = gateway.client.complete(prompt, **VERY_LONG)
        gateway.assert_idle()  # who holds something from now on runs the stream
        with ThreadPoolExecutor(1) as pool:
            answer = stream(pool, gateway, prompt, VERY_LONG)
            eventually(lambda: holder(gateway), 20, "the stream runs")
            worker.send_signal(signal.SIGTERM)
            eventually(lambda: gateway.client.get("/ready").status_code == 503, 10, "nothing new is taken")
            refused = gateway.client.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert not answer.done()
            assert answer.result(timeout=120).choices == expected.choices
        assert worker.wait(LEAVE_TIMEOUT_S).code == 0
        eventually(lambda: not gateway.workers(), 5, "it is forgotten")
        # A worker joins under the same name, at any time.
        running.start("decode-0")
        running.wait_ready()
        assert gateway.client.complete(prompt, **VERY_LONG).choices == expected.choices


def test_a_second_signal_ends_a_draining_worker_at_once(tiny: Path, runtime: Path) -> None:
    with cluster(tiny, runtime, "gateway-0", "decode-0") as running:
        gateway, worker = running.gateways["gateway-0"], running.workers["decode-0"]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(gateway.client.complete, random_prompt(1, 50), max_tokens=2500, **GREEDY)
            eventually(lambda: holder(gateway), 20, "the request runs")
            worker.send_signal(signal.SIGTERM)
            eventually(lambda: gateway.workers()[0]["state"] == "draining", 5, "it drains")
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(10).code == 0, "not after the 30 s that it may drain"
            assert not answer.done()
            running.start("decode-0")  # its request was waiting for that
            assert len(answer.result(timeout=120).token_ids) == 2500


def test_worker_of_a_supervised_system_that_was_drained_stays_away(tiny: Path) -> None:
    with System(tiny, "--kv-blocks", 512, "--prefill-kv-blocks", 512, decode=2) as system:
        done = drain("decode-1", system.url)
        assert done.returncode == 0, done.stderr
        assert "decode-1" in done.stdout
        eventually(lambda: list(system.pids("decode")) == ["decode-0"], 10, "it has left")
        eventually(lambda: "decode-1 has left, as it was told to" in system.stderr, 10, "the log says so")
        time.sleep(2.0)  # longer than the pause before a child is started again
        assert list(system.pids("decode")) == ["decode-0"]
        assert system.client.complete(random_prompt(1, 50), max_tokens=5, **GREEDY).finish_reason == "length"
        unknown = drain("decode-1", system.url)
        assert unknown.returncode == 2
        assert "decode-1" in unknown.stderr


def test_a_gateway_that_stops_refuses_connections_and_finishes_its_streams(pair: Cluster) -> None:
    leaving, staying = pair.gateways["gateway-0"], pair.gateways["gateway-1"]
    prompt = random_prompt(1, 50)
    expected = staying.client.complete(prompt, **VERY_LONG)
    with ThreadPoolExecutor(2) as pool:
        answers = [stream(pool, gateway, prompt, VERY_LONG) for gateway in (leaving, staying)]
        eventually(lambda: leaving.metric("pdserve_requests_inflight") == 1, 20, "its stream runs")
        leaving.send_signal(signal.SIGTERM)

        def refuses() -> bool:
            try:
                httpx.get(f"{leaving.url}/health", trust_env=False)
            except httpx.ConnectError:
                return True
            except httpx.TransportError:
                return False  # it came in just before, and was not heard
            return False

        eventually(refuses, 10, "connections are refused")
        assert leaving.running
        for answer in answers:
            assert answer.result(timeout=120).choices == expected.choices
    assert leaving.wait(LEAVE_TIMEOUT_S).code == 0
    assert "Traceback" not in leaving.stderr
    staying.assert_idle()


def test_death_of_one_gateway_drops_its_requests_alone(pair: Cluster) -> None:
    dying, living = pair.gateways["gateway-0"], pair.gateways["gateway-1"]
    prompt = random_prompt(1, 50)
    expected = living.client.complete(prompt, **LONG)
    with ThreadPoolExecutor(2) as pool:
        doomed = pool.submit(dying.client.complete, prompt, max_tokens=4000, **GREEDY)
        eventually(lambda: dying.metric("pdserve_requests_inflight") == 1, 20, "its request runs")
        answer = stream(pool, living, prompt)
        os.kill(dying.pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            doomed.result(timeout=30)
        assert answer.result(timeout=60).choices == expected.choices
    # The workers find it silent after their bound, and until then hold what it wanted.
    living.assert_idle(10)
    assert len(living.workers()) == 3
    pair.start("gateway-0")
    pair.wait_ready()
    assert pair.gateways["gateway-0"].client.complete(prompt, **LONG).choices == expected.choices


def test_a_worker_frozen_past_the_bound_comes_back_as_somebody_else_with_nothing_of_its_old_life(
    pair: Cluster,
) -> None:
    gateway = pair.gateways["gateway-0"]
    prompt = random_prompt(1, 50)
    expected = gateway.client.complete(prompt, **LONG)
    with ThreadPoolExecutor(1) as pool:
        answer = stream(pool, gateway, prompt)
        name = eventually(lambda: holder(gateway), 20, "the stream runs")
        old = {worker["name"]: worker["id"] for worker in gateway.workers()}
        pid = gateway.pids("decode")[name]
        os.kill(pid, signal.SIGSTOP)
        try:
            assert answer.result(timeout=60).choices == expected.choices
            for each in pair.gateways.values():
                eventually(lambda each=each: name not in {w["name"] for w in each.workers()}, 20, "it is given up")
        finally:
            os.kill(pid, signal.SIGCONT)
    pair.wait_ready()
    for each in pair.gateways.values():
        ids = {worker["name"]: worker["id"] for worker in each.workers()}
        assert ids.keys() == old.keys()
        assert [changed for changed in ids if ids[changed] != old[changed]] == [name]
        assert each.pids("decode")[name] == pid
        each.assert_idle()
