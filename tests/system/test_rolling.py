"""Every process of a system is restarted under load, one after the other, and no request fails."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.system.client import Answer, Choice, Client
from tests.system.cluster import Cluster, cluster
from tests.system.harness import Surface
from tests.system.tiny_model import random_prompt

pytestmark = pytest.mark.timeout(600, method="signal")

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
GATEWAYS = ("gateway-0", "gateway-1")
NUM_CLIENTS = 4
NUM_PROMPTS = 8
ASK = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
EXIT_TIMEOUT_S = 60.0


@pytest.fixture
def system(tiny: Path, runtime: Path) -> Iterator[Cluster]:
    flags = ("--kv-blocks", 512, "--check-invariants")
    with cluster(tiny, runtime, *GATEWAYS, *WORKERS, worker_flags=flags) as running:
        yield running


@dataclass
class Load:
    """Clients that ask one thing after the other, at both gateways in turn; a refused connection goes to the other."""

    urls: list[str]
    model: str
    expected: dict[int, list[Choice]]  # by seed of the prompt
    wrong: list[str] = field(default_factory=list)
    done: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(NUM_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"

    def _client(self, number: int) -> None:
        for turn in itertools.count(number):
            if self._stop.is_set():
                return
            seed = turn % NUM_PROMPTS
            try:
                answer = self._ask(turn, seed)
                ok = answer.choices == self.expected[seed] and answer.usage["completion_tokens"] == ASK["max_tokens"]
                problem = "" if ok else f"prompt {seed}: {answer}"
            except Exception as error:  # every failure counts, whatever it is
                problem = f"prompt {seed}: {type(error).__name__}: {error}"
            with self._lock:
                self.done += 1
                if problem:
                    self.wrong.append(problem)

    def _ask(self, turn: int, seed: int) -> Answer:
        """Half of them streamed. Raises what the client raises, but for a refused connection."""
        for attempt in itertools.count():
            client = Client(self.urls[(turn + attempt) % len(self.urls)], self.model)
            try:
                prompt = random_prompt(seed, 60)
                if turn % 2:
                    return client.stream("/v1/completions", prompt=prompt, **ASK)
                return client.complete(prompt, **ASK)
            except httpx.ConnectError:
                with self._lock:
                    self.refused += 1
                if attempt == 20:
                    raise
            finally:
                client.close()
        raise AssertionError("unreachable")


def restart(system: Cluster, name: str) -> None:
    launch = system.gateways.get(name) or system.workers[name]
    old_pid = launch.pid
    launch.send_signal(signal.SIGTERM)
    result = launch.wait(EXIT_TIMEOUT_S)
    assert result.code == 0, result.stderr[-4000:]
    assert "Traceback" not in result.stderr, result.stderr[-4000:]
    if isinstance(launch, Surface):
        launch.client.close()
    system.start(name)
    system.wait_ready()
    assert (system.gateways.get(name) or system.workers[name]).pid != old_pid


def retries(system: Cluster, kind: str = "") -> float:
    labels = {"kind": kind} if kind else {}
    return sum(gateway.metric("pdserve_retries_total", **labels) for gateway in system.gateways.values())


def test_rolling_restart_of_every_process_under_load_fails_no_request(system: Cluster) -> None:
    first = system.gateways["gateway-0"]
    expected = {seed: first.client.complete(random_prompt(seed, 60), **ASK).choices for seed in range(NUM_PROMPTS)}
    urls = [gateway.url for gateway in system.gateways.values()]
    with Load(urls, first.client.model, expected) as load:
        for name in WORKERS:
            before = load.done
            restart(system, name)
            assert load.done > before, f"nothing was answered while {name} restarted"
        # Now, since a gateway that starts again counts from zero; all of them first, since they go on counting.
        total, moved, busy = (retries(system, kind) for kind in ("", "drained", "busy"))
        for name in GATEWAYS:
            before = load.done
            restart(system, name)
            assert load.done > before, f"nothing was answered while {name} restarted"
    assert load.wrong == []
    assert load.refused > 0, "no client came while a gateway was away"
    assert moved > 0, "no request was at a decode worker when it was told to leave"
    assert total <= moved + busy, "requests failed over for another reason than a drain"
    for gateway in system.gateways.values():
        gateway.assert_idle()
        assert len(gateway.workers()) == len(WORKERS)
