"""Two versions of a model behind one gateway: the new one joins, takes over user by user, and the old one leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.exact.reference import Case, Reference, agree
from tests.system.client import Client, Refused
from tests.system.harness import Gateway, Launch, eventually, free_port
from tests.system.tiny_model import VOCAB_SIZE, load_tiny_llama, random_prompt, write_tiny_llama

pytestmark = pytest.mark.timeout(300, method="signal")

MAX_TOKENS = 24
NUM_PROMPTS = 6
USERS = [f"user-{i}" for i in range(12)]
VERSIONS = ("v1", "v2")
START_TIMEOUT_S = 120.0
PAUSE_S = 0.1  # between two requests of the load: it shall not keep the new workers from starting


@dataclass(frozen=True)
class Version:
    path: Path
    reference: Reference
    cases: Sequence[Case]

    def check(self, number: int, tokens: list[int]) -> None:
        """Raises AssertionError unless these are this version's tokens behind the prompt."""
        assert agree(self.cases[number], tokens, self.reference, lambda prompt, most: []) == 0


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Version]:
    """Other weights and another vocabulary; what each says to the prompts, as transformers runs it."""
    root = tmp_path_factory.mktemp("versions")
    made = {}
    for name, seed, vocab_size in (("v1", 7, VOCAB_SIZE), ("v2", 8, VOCAB_SIZE + 64)):
        path = write_tiny_llama(root / name, seed, vocab_size=vocab_size)
        reference = Reference(lambda path=path: load_tiny_llama(path), name, root / f"{name}-reference")
        prompts = [random_prompt(i, 50 + i) for i in range(NUM_PROMPTS)]
        outputs = [reference.output(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
        cases = [Case(f"{name}/{i}", [], p, o) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))]
        made[name] = Version(path, reference, cases)
    assert all(a.expected != b.expected for a, b in zip(made["v1"].cases, made["v2"].cases, strict=True))
    return made


@dataclass
class Site:
    """One gateway that knows both versions, started by hand, and workers by version."""

    versions: dict[str, Version]
    runtime: Path
    stack: ExitStack
    workers: dict[str, Launch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.control = f"ipc://{self.runtime}/gateway"
        models = [flag for name, v in self.versions.items() for flag in ("--model", f"{name}={v.path}")]
        alias = ("--alias", "chat=v1:100,v2:0", "--local-prefill", "never", "--listen", self.control)
        self.gateway = Gateway("gateway", *models, *alias, model="chat", port=free_port(), runtime=self.runtime)
        self.stack.callback(self.gateway.client.close)
        self.stack.callback(self.gateway.kill_all)

    def start(self, version: str) -> None:
        """A prefill and a decode worker of the version."""
        common = ("--model", self.versions[version].path, "--served-model-name", version, "--kv-blocks", 256)
        for role in ("prefill", "decode"):
            flags = ("--gateway", self.control, "--name", f"{role}-{version}", "--check-invariants")
            worker = self.workers[f"{role}-{version}"] = Launch(role, *common, *flags, runtime=self.runtime)
            self.stack.callback(worker.kill_all)

    def wait_ready(self, version: str) -> None:
        self.gateway.wait_alive()
        get = self.gateway.client.get
        eventually(lambda: get(f"/ready?model={version}").status_code == 200, START_TIMEOUT_S, f"{version} is ready")

    def set_weights(self, **weights: int) -> None:
        answer = httpx.post(f"{self.gateway.url}/admin/aliases/chat", json=weights, trust_env=False)
        assert answer.status_code == 200, answer.text

    def ask(self, client: Client, number: int, **fields: Any) -> str:
        """Ask one of the prompts. Returns the version that answered, having compared its tokens."""
        prompt = self.versions["v1"].cases[number].prompt
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        response = client.post("/v1/completions", {"return_token_ids": True, **body, **fields})
        if response.status_code != 200:
            raise Refused(response)
        answer = response.json()
        version: str = answer["model"]
        self.versions[version].check(number, answer["choices"][0]["token_ids"])
        return version

    def served(self) -> dict[str, str]:
        """User → version."""
        client = self.gateway.client
        return {user: self.ask(client, i % NUM_PROMPTS, user=user) for i, user in enumerate(USERS)}


@dataclass
class Load:
    """Somebody who asks for the alias all the time, each time as another user."""

    site: Site
    wrong: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        client = Client(self.site.gateway.url, "chat")
        while not self._stop.wait(PAUSE_S):
            number = len(self.served) + len(self.wrong)
            try:
                self.served.append(self.site.ask(client, number % NUM_PROMPTS, user=f"load-{number}"))
            except Exception as error:  # every failure counts, whatever it is
                self.wrong.append(f"{type(error).__name__}: {error}")
        client.close()

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a request hangs"


@pytest.fixture
def site(versions: dict[str, Version], runtime: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        site = Site(versions, runtime, stack)
        try:
            yield site
        except BaseException as error:
            error.add_note("\n".join(launch.log_tail(40) for launch in (site.gateway, *site.workers.values())))
            raise


def test_a_new_version_takes_over_user_by_user_and_no_request_fails(site: Site) -> None:
    gateway, client = site.gateway, site.gateway.client
    site.start("v1")
    site.wait_ready("v1")
    with pytest.raises(Refused, match="'v2'") as refused:
        site.ask(client, 0, model="v2")
    assert (refused.value.status, refused.value.headers["retry-after"]) == (503, "1")
    with Load(site) as load:
        site.start("v2")
        site.wait_ready("v2")
        assert [site.ask(client, 0, model=name) for name in VERSIONS] == list(VERSIONS)
        assert set(site.served().values()) == set(load.served) == {"v1"}
        rare = {"prompt": [VOCAB_SIZE + 1], "max_tokens": 1}
        statuses = [client.post("/v1/completions", {**rare, "model": name}).status_code for name in VERSIONS]
        assert statuses == [400, 200], "each has its own vocabulary"

        site.set_weights(v1=50, v2=50)
        half = site.served()
        assert set(half.values()) == {"v1", "v2"}
        assert site.served() == half, "a user stays with one version"

        site.set_weights(v1=0, v2=100)
        assert set(site.served().values()) == {"v2"}
        for role in ("decode", "prefill"):
            site.workers[f"{role}-v1"].send_signal(signal.SIGTERM)
            assert site.workers[f"{role}-v1"].wait(60).code == 0
        eventually(lambda: gateway.metric("pdserve_transfer_bytes_total", model="v2") > 0, 5, "KV of v2 has moved")
        assert set(site.served().values()) == {"v2"}
    assert load.wrong == []
    assert {"v1", "v2"} <= set(load.served)
    assert {worker["model"] for worker in gateway.workers()} == {"v2"}
    for version in VERSIONS:
        assert gateway.metric("pdserve_requests_total", model=version, outcome="ok") > 0
    gateway.assert_idle()
