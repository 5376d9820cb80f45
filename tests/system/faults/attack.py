"""The faults. Each one first finds a process that holds live requests, and records how many, before it strikes."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.system.faults.fleet import Fleet
from tests.system.faults.judge import Fault, Judge
from tests.system.faults.load import Answer, Case, ask
from tests.system.harness import eventually
from tests.system.tiny_model import random_prompt

TARGET_TIMEOUT_S = 6.0  # to find a process that holds requests
SETTLE_S = 0.1  # for the gateway to read what a process sent before it froze
STRIKE_TIMEOUT_S = 6.0  # for a frame that fits to pass
BACK_TIMEOUT_S = 40.0
MANY = 1_000_000
STORM_CLIENTS = 24
STORM_PROMPTS = 40

ALL_KINDS = ("Slab", "Handoff")

WEIGHTS: dict[str, float] = {
    "kill decode": 5,
    "kill prefill": 5,
    "kill pool": 0.5,
    "freeze decode short": 4,
    "freeze decode long": 3,
    "freeze decode at bound": 2,
    "freeze prefill short": 4,
    "freeze prefill long": 3,
    "freeze prefill at bound": 2,
    "freeze gateway short": 1,
    "freeze gateway long": 0.5,
    "slow decode": 3,
    "slow prefill": 3,
    "link drop": 5,
    "link delay": 4,
    "link duplicate": 4,
    "link reorder": 4,
    "link corrupt payload": 5,
    "link corrupt header": 5,
    "link corrupt token": 2,
    "link control drop": 3,
    "link silence": 1,
    "cancel storm": 4,
}
"""How often each kind is drawn, relative to the others."""


class Missed(Exception):
    """No process held a live request, or no frame came by, in time: nothing was done."""


class Attack:
    """Strikes one system. Several faults may be under way at once, but only one on a process."""

    def __init__(self, fleet: Fleet, judge: Judge, rng: random.Random, open_requests: Callable[[], int]) -> None:
        self.fleet = fleet
        self.judge = judge
        self.spared: set[str] = set()  # processes never to be killed
        self.num_storm_requests = 0
        self._rng = rng
        self._open_requests = open_requests
        self._busy: set[str] = set()
        self._busy_lock = threading.Lock()
        self._arms = itertools.count(1)
        self._struck: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._stopping = threading.Event()
        fleet.proxy.on_report = self._on_struck

    def stop(self) -> None:
        """Cut short whatever is only a matter of waiting."""
        self._stopping.set()

    def strike(self, kind: str) -> Fault:
        """Do it, and see it through (restart what was killed, thaw what was frozen). Raises Missed."""
        what, _, rest = kind.partition(" ")
        match what:
            case "kill" if rest == "pool":
                return self.kill_pool(self._rng.choice(("prefill", "decode")))
            case "kill":
                return self.kill(rest)
            case "freeze":
                program, _, how = rest.partition(" ")
                return self.freeze(program, self._freeze_s(how), kind)
            case "slow":
                return self.slow(rest, self._rng.uniform(1.5, 4.0))
            case "link":
                return self._strike_link(rest)
            case _:
                return self.cancel_storm()

    def _freeze_s(self, how: str) -> float:
        bound_s = self.fleet.shape.death_bound_s
        return {
            "short": self._rng.uniform(0.1, 0.6) * bound_s,
            "at bound": bound_s + self._rng.uniform(-0.3, 0.3),
            "long": bound_s + self._rng.uniform(0.6, 2.0),
        }[how]

    # --- finding a target ----------------------------------------------------------------------------------------

    @contextmanager
    def _target(self, program: str, *, spare: bool = False) -> Iterator[tuple[str, int]]:
        """A frozen process of that program that holds requests, and how many. It is ours until the block ends."""

        def find() -> tuple[str, int] | None:
            names = [name for name in self.fleet.names(program) if not (spare and name in self.spared)]
            self._rng.shuffle(names)
            return next((found for name in names if (found := self._try_target(name))), None)

        try:
            name, inflight = eventually(find, TARGET_TIMEOUT_S, f"a {program} process holds a request")
        except AssertionError as error:
            raise Missed(str(error)) from None
        try:
            yield name, inflight
        finally:
            self.fleet.thaw(name)
            with self._busy_lock:
                self._busy.discard(name)

    def _try_target(self, name: str) -> tuple[str, int] | None:
        """Claim and freeze it, so that what it holds cannot get away, and look."""
        with self._busy_lock:
            if name in self._busy or self.fleet.members[name].pid == 0:
                return None
            self._busy.add(name)
        self.fleet.freeze(name)
        if self._held_by(name):
            time.sleep(SETTLE_S)  # what it had sent before it froze may yet end some of them
            if inflight := self._held_by(name):
                return name, inflight
        self.fleet.thaw(name)
        with self._busy_lock:
            self._busy.discard(name)
        return None

    def _held_by(self, name: str) -> int:
        return self._open_requests() if name == "gateway" else self.fleet.inflight().get(name, 0)

    def _begin(self, kind: str, process: str, inflight: int, detail: str = "") -> Fault:
        fault = Fault(kind, process, inflight, time.monotonic(), detail=detail)
        self.judge.faults.append(fault)
        return fault

    def _wait(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    # --- processes -----------------------------------------------------------------------------------------------

    def kill(self, program: str, *, restart: bool = True) -> Fault:
        with self._target(program, spare=True) as (name, inflight):
            fault = self._begin(f"kill {program}", name, inflight)
            self.fleet.kill(name)
            if restart:
                self._wait(self._rng.uniform(0.5, 1.5))
                self.bring_back(name)
            fault.ended_at = time.monotonic()
            return fault

    def kill_pool(self, program: str) -> Fault:
        """All of a pool at once that may be killed, and that nobody else is busy with."""
        with self._target(program, spare=True) as (name, inflight):
            fault = self._begin("kill pool", name, inflight, detail=program)
            others = [other for other in self.fleet.names(program) if other not in self.spared and other != name]
            with self._busy_lock:
                others = [other for other in others if other not in self._busy and self.fleet.members[other].pid]
                self._busy |= set(others)
            try:
                for victim in (name, *others):
                    self.fleet.kill(victim)
                self._wait(self._rng.uniform(0.5, 1.5))
                for victim in (name, *others):
                    self.bring_back(victim)
            finally:
                with self._busy_lock:
                    self._busy -= set(others)
            fault.ended_at = time.monotonic()
            return fault

    def bring_back(self, name: str) -> None:
        """Start it again, and wait until the gateway has it."""
        self.fleet.spawn(name)
        self.wait_registered(name)

    def wait_registered(self, name: str) -> None:
        def registered() -> bool:
            return any(worker["pid"] == self.fleet.members[name].pid for worker in self.fleet.workers())

        eventually(registered, BACK_TIMEOUT_S, f"{name} is registered again")

    def freeze(self, program: str, seconds: float, kind: str) -> Fault:
        with self._target(program) as (name, inflight):
            fault = self._begin(kind, name, inflight, detail=f"{seconds:.2f} s")
            self._wait(seconds)
            self.fleet.thaw(name)
            fault.ended_at = time.monotonic()
            if program != "gateway":
                self.wait_registered(name)
            return fault

    @contextmanager
    def standing_still(self, program: str) -> Iterator[str]:
        """The name of a process of that program that holds requests, frozen as long as the block lasts."""
        with self._target(program) as (name, inflight):
            fault = self._begin(f"freeze {program}", name, inflight)
            yield name
            fault.ended_at = time.monotonic()

    def slow(self, program: str, seconds: float) -> Fault:
        """It runs a fifth of the time."""
        with self._target(program) as (name, inflight):
            fault = self._begin(f"slow {program}", name, inflight)
            until = fault.began_at + seconds
            while time.monotonic() < until and not self._stopping.is_set():
                self.fleet.freeze(name)
                self._wait(0.12)
                self.fleet.thaw(name)
                self._wait(0.03)
            fault.ended_at = time.monotonic()
            return fault

    # --- links ---------------------------------------------------------------------------------------------------

    def _on_struck(self, report: dict[str, Any]) -> None:
        self._struck[report["struck"]].put(report)

    def _strike_link(self, how: str) -> Fault:
        link = self._rng.choice(self._holders())
        if how == "silence":
            return self.silence(link, self.fleet.shape.death_bound_s + self._rng.uniform(0.3, 1.5))
        if how == "control drop":
            return self.harm(link, "drop", kinds=(), socket="control", count=self._rng.randint(1, 4))
        choices = [("Slab",), ("Handoff",), ALL_KINDS]
        only = {"corrupt payload": ("Slab",), "corrupt token": ("Handoff",)}
        kinds = only.get(how) or self._rng.choice(choices)
        return self.harm(link, how.replace(" ", "_"), kinds=kinds, delay_s=self._rng.uniform(0.1, 2.0))

    def _holders(self) -> list[str]:
        def find() -> list[str]:
            load = self.fleet.inflight()
            return [name for name in self.fleet.names("decode") if load.get(name)]

        try:
            return eventually(find, TARGET_TIMEOUT_S, "a decode worker holds a request")
        except AssertionError as error:
            raise Missed(str(error)) from None

    @contextmanager
    def watching(self, link: str, kinds: tuple[str, ...]) -> Iterator[queue.Queue[dict[str, Any]]]:
        """A report of every such frame on its way to decode worker `link`, unharmed."""
        with self._armed(link, "bulk", "watch", kinds, MANY, 0.0) as seen:
            yield seen

    def harm(
        self,
        link: str,
        harm: str,
        *,
        kinds: tuple[str, ...] = ALL_KINDS,
        socket: str = "bulk",
        count: int = 1,
        delay_s: float = 0.5,
    ) -> Fault:
        """Harm the next frames that fit on the link to decode worker `link`."""
        label = f"link {'control ' if socket == 'control' else ''}{harm.replace('_', ' ')}"
        with self._armed(link, socket, harm, kinds, count, delay_s) as struck:
            try:
                report = struck.get(timeout=STRIKE_TIMEOUT_S)
            except queue.Empty:
                raise Missed(f"no {kinds or 'frame'} passed on the link to {link}") from None
            inflight = self.fleet.inflight().get(link, 0)
            if report["kind"] in ALL_KINDS:
                inflight = max(inflight, 1)  # the frame belongs to one
            detail = f"{report['kind']} of {report['request'] or '-'} from {report['sender']}"
            fault = self._begin(label, link, inflight, detail)
            for _ in range(count - 1):
                try:
                    struck.get(timeout=1.0)
                except queue.Empty:
                    break
            self._wait(delay_s if harm == "delay" else 0.0)
            fault.ended_at = time.monotonic()
            return fault

    def silence(self, link: str, seconds: float) -> Fault:
        """Nothing passes on the link's control socket, either way."""
        inflight = self.fleet.inflight().get(link, 0)
        if not inflight:
            raise Missed(f"{link} holds nothing any more")
        with self._armed(link, "control", "drop", (), MANY, 0.0):
            fault = self._begin("link silence", link, inflight, detail=f"{seconds:.2f} s")
            self._wait(seconds)
            fault.ended_at = time.monotonic()
            return fault

    @contextmanager
    def _armed(
        self, link: str, socket: str, harm: str, kinds: tuple[str, ...], count: int, delay_s: float
    ) -> Iterator[queue.Queue[dict[str, Any]]]:
        arm = next(self._arms)
        struck = self._struck.setdefault(arm, queue.Queue())
        seed = self._rng.getrandbits(32)
        rule = {"arm": arm, "link": link, "socket": socket, "harm": harm, "kinds": list(kinds), "count": count}
        self.fleet.proxy.order(**rule, delay_s=delay_s, seed=seed)
        try:
            yield struck
        finally:
            self.fleet.proxy.order(disarm=arm)

    # --- clients -------------------------------------------------------------------------------------------------

    def cancel_storm(self) -> Fault:
        """Strikes whichever worker got the most of it."""
        inflight: dict[str, int] = {}
        began_at = time.monotonic()
        left = self.storm(lambda: inflight.update(self.fleet.inflight()))
        process = max(inflight, key=lambda name: inflight[name], default="gateway")
        most, now = inflight.get(process, 0), time.monotonic()
        fault = Fault("cancel storm", process, most, began_at, now, f"{left} left early")
        self.judge.faults.append(fault)
        return fault

    def storm(self, in_the_middle: Callable[[], None] = lambda: None) -> int:
        """Many clients come at once, with long and short prompts, and leave soon. How many left unanswered."""
        rng, port = self._rng, self.fleet.port
        visits = []
        for _ in range(STORM_CLIENTS):
            prompt = random_prompt(rng.randrange(STORM_PROMPTS), rng.choice((30, 300, 1500)))
            body = {"model": self.fleet.shape.name, "prompt": prompt, "n": rng.choice((1, 1, 2)), "max_tokens": 200}
            case = Case("storm", body | {"temperature": 0, "ignore_eos": True})
            visits.append((case, rng.random() < 0.7, rng.uniform(0.02, 1.5)))
        self.num_storm_requests += len(visits)

        def visit(plan: tuple[Case, bool, float]) -> Answer:
            case, stream, leave_s = plan
            return ask(port, case, stream=stream, leave_s=leave_s)

        with ThreadPoolExecutor(STORM_CLIENTS) as pool:
            answers = pool.map(visit, visits)
            self._wait(0.3)
            in_the_middle()
            return sum(answer.left for answer in answers)
