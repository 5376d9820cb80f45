"""The models that are attacked, what is asked of them, and the check that nothing is left in the end."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from pdserve.engine.checkpoint import resolve
from tests.exact.prompts import document
from tests.exact.reference import demo_model, demo_tokenizer
from tests.system.faults.fleet import Fleet
from tests.system.faults.load import Case, greedy_cases, stop_case, varied_cases, with_golden
from tests.system.harness import SETTLE_S, eventually
from tests.system.tiny_model import load_tiny_llama, random_prompt, write_tiny_llama

TINY_LAYERS = 8
IDLE_TIMEOUT_S = 10.0
RECOVERY_TIMEOUT_S = 60.0


class Model:
    """Weights to serve, the reference's copy of them, and prompts that suit it."""

    def __init__(self, name: str, path: Path, reference: Any) -> None:
        self.name = name
        self.path = path
        self._reference = reference

    def prompt(self, rng: random.Random, num_tokens: int) -> list[int]:
        if self.name != "demo":
            return random_prompt(rng.getrandbits(32), num_tokens)
        text = document(rng.getrandbits(32), 8 * num_tokens, (4, 1, 1, 1))
        ids: list[int] = demo_tokenizer()(text)["input_ids"][:num_tokens]
        return ids

    def cases(
        self, port: int, rng: random.Random, *, num_greedy: int, outputs: tuple[int, int]
    ) -> tuple[list[Case], list[Case]]:
        """(greedy, others), each with its golden answer from the undisturbed system at `port`."""
        plain = greedy_cases(self.name, self._reference, self.prompt, rng, num_greedy, (20, 600), outputs)
        greedy = with_golden(port, plain)
        others = [*varied_cases(plain, rng), *(stop_case(case) for case in greedy[:2])]
        return greedy, with_golden(port, others)


def tiny(directory: Path, num_layers: int = TINY_LAYERS) -> Model:
    """Random weights: fast to start, and as exact as any."""
    path = write_tiny_llama(directory / "tiny", seed=7, num_layers=num_layers)
    return Model("tiny", path, load_tiny_llama(path))


def demo() -> Model:
    return Model("demo", resolve("demo"), demo_model())


def wait_whole(fleet: Fleet, timeout_s: float = RECOVERY_TIMEOUT_S) -> None:
    """Until every process that should run is registered in its present life, and all are linked."""

    def whole() -> bool:
        pids = {worker["name"]: worker["pid"] for worker in fleet.workers()}
        return all(pids.get(name) == m.pid for name, m in fleet.members.items() if m.program != "gateway")

    eventually(whole, timeout_s, "every worker is registered")
    fleet.wait_linked(fleet.shape.prefill, fleet.shape.decode, timeout_s)


def remains(fleet: Fleet) -> list[str]:
    """Whatever an idle system still holds or counts as under way, in words."""
    found = []
    pools = fleet.client.get("/pools").json()
    if pools["queued"]:
        found.append(f"{pools['queued']} requests queued")
    for worker in pools["workers"]:
        if worker["blocks"].get("held"):
            found.append(f"{worker['name']} holds {worker['blocks']['held']} blocks")
        found += [f"{worker['name']}: {what} {count}" for what, count in worker["load"].items() if count]
    if inflight := fleet.metric("pdserve_requests_inflight"):
        found.append(f"pdserve_requests_inflight {inflight:g}")
    if held := fleet.held_blocks():
        found.append(f"pdserve_kv_blocks held {held:g}")
    return found


def assert_nothing_remains(fleet: Fleet) -> None:
    """The system is idle within seconds, and stays so."""
    try:
        eventually(lambda: not remains(fleet), IDLE_TIMEOUT_S, "nothing is held")
    except AssertionError:
        raise AssertionError(f"after {IDLE_TIMEOUT_S} s without requests: {', '.join(remains(fleet))}") from None
    time.sleep(SETTLE_S)
    assert not remains(fleet), f"came back: {remains(fleet)}"
