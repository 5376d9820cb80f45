"""`make soak MINUTES=n [SEED=s] [FAULTS=n]`: random faults under load, for so long or so many; then the verdict.

8 clients stream greedy answers one after the other, two more ask for samples, several choices and stop strings, while
one fault after another strikes a process that holds live requests. In the end the table, one JSON line, and exit code
1 if anything was wrong, hung, left behind, or grew.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.faults.attack import WEIGHTS, Attack, Missed
from tests.system.faults.fleet import Fleet, Shape
from tests.system.faults.judge import Judge, Verdict
from tests.system.faults.load import Case, Load, ask
from tests.system.faults.scenario import Model, assert_nothing_remains, demo, tiny, wait_whole

AT_ONCE = 2  # faults under way at a time
PAUSE_S = (0.1, 0.8)  # between the starts of two faults
MAX_ERROR_SHARE = 0.05
MIN_REMOTE_SHARE = 0.2  # of prompts that prefill workers get, or hardly a transfer is struck
MAX_GROWTH_BYTES = 1 << 20  # per 100 faults
MAX_MORE_FILES = 40  # open at the end, than when warm: links differ with who is alive, a leak has no end
GROWTH_NEEDS_FAULTS = 100  # fewer say nothing about growth
WARM_UP_STORMS = 10  # threads, arenas and KV pages that only a crowd makes a process touch
WARM_UP_FAULTS = 50
MAX_MISSES = 200
SPARED = ("prefill-0", "decode-0")  # never killed, so that their memory can be watched
PROGRESS_EVERY_S = 10.0
LAST_WORDS_CHARS = 8000


@dataclass
class Memory:
    """What every process that was never restarted keeps, as (faults so far, bytes)."""

    samples: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    open_files: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def note(self, fleet: Fleet, num_faults: int) -> None:
        for name, size in fleet.kept_bytes().items():
            self.samples[name].append((num_faults, size))
        for name, count in fleet.open_files().items():
            self.open_files[name].append(count)

    def more_files(self, fleet: Fleet) -> dict[str, int]:
        """How many more files than at first are open in processes still in their first life."""
        return {
            name: counts[-1] - counts[0] for name, counts in self.open_files.items() if fleet.members[name].lives == 1
        }

    def growth(self, fleet: Fleet) -> dict[str, tuple[int, float]]:
        """(faults watched, bytes per 100 faults) of processes still in their first life, once warm."""
        found = {}
        for name, samples in self.samples.items():
            warm = [(at, size) for at, size in samples if at >= WARM_UP_FAULTS]
            if fleet.members[name].lives > 1 or len(warm) < 4:
                continue
            part = max(len(warm) // 5, 1)
            first, last = warm[:part], warm[-part:]
            faults = statistics.mean(at for at, _ in last) - statistics.mean(at for at, _ in first)
            grown = statistics.median(size for _, size in last) - statistics.median(size for _, size in first)
            found[name] = (warm[-1][0] - warm[0][0], 100 * grown / max(faults, 1.0))
        return found


class Soak:
    """One run against one fleet."""

    def __init__(self, fleet: Fleet, model: Model, seed: int, kinds: dict[str, float]) -> None:
        self.fleet = fleet
        self.judge = Judge()
        self.memory = Memory()
        self._rng = random.Random(seed)
        self._seed = seed
        self._kinds = kinds
        num_greedy, outputs = (6, (15, 40)) if model.name == "demo" else (12, (30, 160))
        print("asking the undisturbed system ...", flush=True)
        greedy, others = model.cases(fleet.port, self._rng, num_greedy=num_greedy, outputs=outputs)
        self._cases: list[Case] = [*greedy, *others]
        self.load = Load(fleet.port, greedy, others, self.judge.add, seed)
        self.attack = Attack(fleet, self.judge, random.Random(f"{seed}/attack"), lambda: self.load.open)
        self.attack.spared = set(SPARED)
        self.misses: Counter[str] = Counter()
        self.computed_by: Counter[str] = Counter()  # attempts of requests, by who was to compute their prompt
        self.started_at = time.monotonic()
        self._said_at = 0.0

    def run(self, minutes: float, max_faults: int) -> None:
        """Strike until the time is up or enough has been done, then see whether everything comes to rest."""
        self.started_at = time.monotonic()
        until = self.started_at + 60 * minutes
        self.load.start()
        try:
            for _ in range(WARM_UP_STORMS):
                self.attack.storm()
            self._strike_until(until, max_faults)
        finally:
            self.attack.stop()
            self.load.stop()
        self._conclude()

    def _strike_until(self, until: float, max_faults: int) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            running: set[Future[None]] = set()
            begun = 0
            while time.monotonic() < until and self.num_faults < max_faults and self.misses.total() < MAX_MISSES:
                if self.fleet.ended:
                    return  # a crash: stop, and tell
                alone = False
                if self.num_faults + len(running) < max_faults:
                    kind = self._rng.choices(list(self._kinds), list(self._kinds.values()))[0]
                    # Who is frozen at the gateway's side cannot be asked what it holds.
                    alone = kind.startswith("freeze gateway")
                    if alone:
                        wait(running)
                    running.add(pool.submit(self._strike, kind))
                    begun += 1
                full = alone or len(running) >= AT_ONCE
                done, running = wait(running, timeout=None if full else self._rng.uniform(*PAUSE_S),
                                     return_when="ALL_COMPLETED" if alone else "FIRST_COMPLETED")  # fmt: skip
                for future in done:
                    future.result()
                self._say()
            wait(running)
            for future in running:
                future.result()

    @property
    def num_faults(self) -> int:
        return len(self.judge.faults)

    def _strike(self, kind: str) -> None:
        try:
            self.attack.strike(kind)
        except Missed as missed:
            self.misses[kind] += 1
            print(f"  missed: {kind}: {str(missed)[:160]}", flush=True)
        except AssertionError as error:  # what was struck did not come back
            self.judge.violation(f"{kind}: {str(error)[:1000]}")

    def _say(self) -> None:
        now = time.monotonic()
        if now - self._said_at >= PROGRESS_EVERY_S:
            self._said_at = now
            self.memory.note(self.fleet, self.num_faults)
            judge = self.judge
            verdicts = ", ".join(f"{count} {verdict.value}" for verdict, count in judge.verdicts.items())
            last = judge.faults[-1] if judge.faults else None
            print(
                f"{now - self.started_at:6.0f} s  {self.num_faults:4d} faults  {verdicts}  "
                f"{len(judge.violations)} violations  last: {last.kind + ' ' + last.process if last else '-'}",
                flush=True,
            )

    def _conclude(self) -> None:
        """The system is whole again, holds nothing, and answers every case as before."""
        judge = self.judge
        for ended in self.fleet.ended:
            tail = self.fleet.log_file(ended.name).read_text(errors="replace")[-LAST_WORDS_CHARS:]
            judge.violation(f"{ended.name} ended by itself with code {ended.code}; its last words:\n{tail}")
        if self.fleet.ended:
            return
        try:
            wait_whole(self.fleet)
            assert_nothing_remains(self.fleet)
            self.memory.note(self.fleet, self.num_faults)
            for case in self._cases:
                answer = ask(self.fleet.port, case, stream=True)
                if not answer.complete:
                    judge.violation(f"after the attack {case.name} was answered {answer.status} {answer.error}")
                judge.add(answer)
            assert_nothing_remains(self.fleet)
            self._check_counts()
        except AssertionError as error:
            judge.violation(str(error)[:2000])
        if self.misses.total() >= MAX_MISSES:
            judge.violation("too few faults found a live request")
        errors = judge.verdicts[Verdict.ERROR]
        if errors > MAX_ERROR_SHARE * judge.num_answers:
            judge.violation(f"{errors} errors in {judge.num_answers} answers")
        for where in ("prefill", "decode"):
            self.computed_by[where] = round(self.fleet.metric("pdserve_prefill_choices_total", where=where))
        if self.computed_by["prefill"] < MIN_REMOTE_SHARE * self.computed_by.total():
            judge.violation(f"too few prompts went to prefill workers: {dict(self.computed_by)}")
        for name, (faults, per_100) in self.memory.growth(self.fleet).items():
            if faults >= GROWTH_NEEDS_FAULTS and per_100 >= MAX_GROWTH_BYTES:
                judge.violation(f"{name} grew by {per_100 / 1e6:.2f} MB per 100 faults")

        for name, more in self.memory.more_files(self.fleet).items():
            if more > MAX_MORE_FILES:
                judge.violation(f"{name} has {more} more files open than at first")

    def _check_counts(self) -> None:
        """The gateway's counters agree with what its clients saw."""
        ok, exact = self.fleet.metric("pdserve_requests_total", outcome="ok"), self.judge.verdicts[Verdict.EXACT]
        sent = self.judge.num_answers + self.attack.num_storm_requests + 2 * len(self._cases) + len(self._cases)
        total = self.fleet.metric("pdserve_requests_total")
        if not exact <= ok <= total <= sent:
            self.judge.violation(f"{exact} exact answers, {ok:g} counted ok, {total:g} counted, {sent} sent")

    # --- the report ----------------------------------------------------------------------------------------------

    def report(self) -> None:
        judge = self.judge
        by_kind = defaultdict(list)
        for fault in judge.faults:
            by_kind[fault.kind].append(fault.inflight)
        print(f"\n{'fault':<26}{'times':>6}{'in flight when struck: least':>30}{'mean':>7}{'most':>6}")
        for kind, inflight in sorted(by_kind.items()):
            print(f"{kind:<26}{len(inflight):>6}{min(inflight):>30}{statistics.mean(inflight):>7.1f}{max(inflight):>6}")
        print(f"{'all':<26}{self.num_faults:>6}\n")
        for verdict in Verdict:
            print(f"{verdict.value:<26}{judge.verdicts[verdict]:>6}")
        for code, count in sorted(judge.errors.items()):
            print(f"  {code:<24}{count:>6}")
        print(f"slowest answer {judge.slowest_s:.1f} s, deadline of each 60 s")
        for name, (faults, per_100) in sorted(self.memory.growth(self.fleet).items()):
            print(f"memory of {name:<16}{per_100 / 1e6:>8.2f} MB per 100 faults (over {faults})")
        print(f"more files open than at first: {self.memory.more_files(self.fleet)}")
        print(f"prompts computed by: {dict(self.computed_by)}")
        for text in judge.violations[:40]:
            print(f"VIOLATION: {text}")
        print(json.dumps(self.summary()))

    def summary(self) -> dict[str, object]:
        judge = self.judge
        inflight = [fault.inflight for fault in judge.faults] or [0]
        growth = self.memory.growth(self.fleet)
        return {
            "seed": self._seed,
            "seconds": round(time.monotonic() - self.started_at, 1),
            "faults": self.num_faults,
            "faults_by_kind": dict(sorted(Counter(fault.kind for fault in judge.faults).items())),
            "inflight_when_struck": {"min": min(inflight), "mean": round(statistics.mean(inflight), 2)},
            "missed": self.misses.total(),
            "prompts_computed_by": dict(self.computed_by),
            "answers": {verdict.name.lower(): judge.verdicts[verdict] for verdict in Verdict},
            "errors": dict(judge.errors),
            "slowest_s": round(judge.slowest_s, 2),
            "growth_bytes_per_100_faults": {name: round(per_100) for name, (_, per_100) in growth.items()},
            "violations": len(judge.violations),
        }


def shape_of(model: Model, prefill: int, decode: int, local_prefill: str) -> Shape:
    """Pools so small that preemption happens, and host memory for it so small that it is often full."""
    sizes = (192, "32M") if model.name == "demo" else (224, "2M")
    return Shape(
        model.path,
        model.name,
        prefill=prefill,
        decode=decode,
        prefill_flags=("--kv-blocks", 320, "--chunk-tokens", 64),
        decode_flags=("--kv-blocks", sizes[0], "--swap-memory", sizes[1], "--transfer-deadline-s", 3),
        gateway_flags=("--queue-timeout-s", 15, "--local-prefill", local_prefill),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--faults", type=int, default=100_000, help="stop after so many")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--demo", action="store_true", help="the demo model instead of random weights")
    parser.add_argument("--prefill", type=int, default=3)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--local-prefill", choices=("auto", "never"), default="auto", help="as the gateway's flag")
    parser.add_argument("--only", default="", help="kinds of faults that contain this, such as 'link corrupt'")
    parser.add_argument("--keep-logs", type=Path, help="copy the processes' logs to this directory")
    args = parser.parse_args()
    kinds = {kind: weight for kind, weight in WEIGHTS.items() if args.only in kind}
    if not kinds:
        parser.error(f"no kind of fault contains {args.only!r}")
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="pds-soak-") as directory:
        model = demo() if args.demo else tiny(Path(directory))
        with Fleet(shape_of(model, args.prefill, args.decode, args.local_prefill)) as fleet:
            soak = Soak(fleet, model, args.seed, kinds)
            try:
                soak.run(args.minutes, args.faults)
            finally:
                if args.keep_logs:
                    args.keep_logs.mkdir(parents=True, exist_ok=True)
                    for log in fleet.runtime.glob("*.log"):
                        (args.keep_logs / log.name).write_bytes(log.read_bytes())
                    (args.keep_logs / "memory.json").write_text(json.dumps(soak.memory.samples))
            soak.report()
            fleet.ended.clear()  # a violation already
    return 1 if soak.judge.violations else 0


if __name__ == "__main__":
    sys.exit(main())
