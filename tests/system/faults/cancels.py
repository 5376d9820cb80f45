"""`python -m tests.system.faults.cancels [--tiny]`: what cancelled long prompts cost those who come after them.

1. The time to first token of a short prompt on the idle system.
2. The same directly after a client has left in the middle of a 3,000-token prompt, and how many layers the prefill
   worker still computed for nobody.
3. 300 long prompts, all cancelled, four times over; then the same probe.

Prints a table and one JSON line; exit code 1 if a probe took 1.3 times the idle time or more.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.system.faults.attack import Attack
from tests.system.faults.fleet import Fleet, Shape
from tests.system.faults.judge import Judge
from tests.system.faults.load import Answer, Case, Leave, ask
from tests.system.faults.scenario import Model, assert_nothing_remains, demo, tiny

LONG_TOKENS = 3000
PROBE_TOKENS = 200
NUM_PROBES = 9
NUM_CANCELS = 9
ROUNDS = 4
PROMPTS_PER_ROUND = 300
AT_ONCE = 30
MAX_RATIO = 1.3


class Cancels:
    """The three measurements on one system of one prefill and one decode worker."""

    def __init__(self, fleet: Fleet, model: Model, seed: int) -> None:
        self._fleet = fleet
        self._model = model
        self._rng = random.Random(seed)
        self._attack = Attack(fleet, Judge(), random.Random(seed), lambda: 0)

    def _body(self, num_tokens: int, max_tokens: int) -> dict[str, Any]:
        prompt = self._model.prompt(self._rng, num_tokens)
        return {"model": self._model.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}

    def probe(self) -> float:
        """Seconds to the first token of a short prompt that is in no cache."""
        answer = ask(self._fleet.port, Case("probe", self._body(PROBE_TOKENS, 2)), stream=True)
        assert answer.complete, f"{answer.status} {answer.error}"
        assert answer.first_token_s is not None
        return answer.first_token_s

    def probes(self) -> float:
        return statistics.median(self.probe() for _ in range(NUM_PROBES))

    def cancel_one(self) -> tuple[int, float]:
        """(layers computed for nobody, seconds to the first token of the next request)"""
        case, leave = Case("long", self._body(LONG_TOKENS, 2)), Leave()
        with self._attack.watching("decode-0", ("Slab",)) as slabs, ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(ask, self._fleet.port, case, stream=True, leave=leave)
            for _ in range(self._rng.randint(3, 40)):
                cancelled = slabs.get(timeout=60)["request"]
            while not slabs.empty():
                slabs.get()
            leave.go()
            next_s = self.probe()
            assert leaving.result(60).left
            late = 0
            while not slabs.empty():
                late += slabs.get()["request"] == cancelled
        return late, next_s

    def cancel_many(self) -> None:
        plans = [self._rng.uniform(0.05, 1.5) for _ in range(PROMPTS_PER_ROUND)]
        visits = [(Case("long", self._body(LONG_TOKENS, 2)), leave_s) for leave_s in plans]

        def visit(plan: tuple[Case, float]) -> Answer:
            return ask(self._fleet.port, plan[0], stream=True, leave_s=plan[1])

        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(visit, visits))
        assert all(answer.left for answer in answers), [a.error for a in answers if not a.left][:3]

    def run(self) -> dict[str, Any]:
        self.probes()  # first times are slower
        idle_s = self.probes()
        ones = [self.cancel_one() for _ in range(NUM_CANCELS)]
        late = [layers for layers, _ in ones]
        after_one_s = statistics.median(next_s for _, next_s in ones)
        show(f"idle, {PROBE_TOKENS} tokens", idle_s, idle_s)
        show(f"right after a prompt of {LONG_TOKENS} was cancelled", after_one_s, idle_s)
        print(f"layers computed after the client had left: {late}")
        after_many_s = []
        for number in range(ROUNDS):
            self.cancel_many()
            after_many_s.append(self.probes())
            show(f"after round {number + 1} of {PROMPTS_PER_ROUND} cancelled", after_many_s[-1], idle_s)
            assert_nothing_remains(self._fleet)
        return {
            "idle_ttft_s": round(idle_s, 4),
            "after_cancel_ttft_s": round(after_one_s, 4),
            "layers_after_cancel": late,
            "after_rounds_ttft_s": [round(value, 4) for value in after_many_s],
            "worst_ratio": round(max(after_one_s, *after_many_s) / idle_s, 3),
        }


def show(when: str, value_s: float, idle_s: float) -> None:
    print(f"time to first token {when:<45}{value_s * 1e3:8.1f} ms  {value_s / idle_s:.2f}x", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="cancels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="random weights instead of the demo model")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pds-cancels-") as directory:
        model = tiny(Path(directory)) if args.tiny else demo()
        flags = ("--kv-blocks", 512)
        shape = Shape(
            model.path, model.name, prefill=1, decode=1, worker_flags=flags, check_invariants=False,
            gateway_flags=("--local-prefill", "never"),  # decode would compute prompts that come alone
            prefill_flags=("--ring-memory", "2M"),  # so small that a slab goes for every layer
        )  # fmt: skip
        with Fleet(shape) as fleet:
            result = Cancels(fleet, model, args.seed).run()
    print(json.dumps(result))
    return 1 if result["worst_ratio"] >= MAX_RATIO else 0


if __name__ == "__main__":
    sys.exit(main())
