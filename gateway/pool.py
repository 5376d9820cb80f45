"""Which workers there are, whether they live, and how messages reach them and come back.

Life of a worker here: `Register` is checked and answered; its first heartbeat says it is ready; from then on requests
place *legs* on it (one per live attempt) and its messages about an attempt go to the owner of that leg. It is
forgotten when it says `Leaving`, when its connection is gone, or when it was silent for the death bound; every leg's
owner is told `Lost`. A worker that drains is answered `Drain`: nothing more is placed on it, and what others have room
for is taken off it. Everything runs on the gateway's event loop, in callbacks that never wait.

A connection over ipc ends only with its process. One over TCP may be cut by the network between two healthy ends; then
ZeroMQ connects again under the same identity, the heartbeats show what was lost meanwhile, and the worker keeps its
work, if it is back within `RECONNECT_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from ..transfer.channel import MAX_MESSAGES_PER_DRAIN, FrameCounts, Received, Router
from ..transfer.keys import Curve
from ..transfer.messages import (
    Busy,
    Cancel,
    Drain,
    Failed,
    FirstTokens,
    GatewayHeartbeat,
    Gone,
    Leaving,
    Message,
    Peer,
    Peers,
    Prefill,
    PromptLogprobs,
    Register,
    Registered,
    RegistrationDenied,
    Reserve,
    Reserved,
    Tokens,
    WorkerHeartbeat,
)
from .draining import movable
from .membership import HEARTBEAT_INTERVAL_S, ModelIdentity, refusal, succession
from .worker import Answer, Leg, Lost, NewToken, Worker

log = logging.getLogger(__name__)

DRAIN_INTERVAL_S = 0.05  # ZeroMQ's descriptor is edge-triggered; this bounds what a missed edge can cost
BUSY_PAUSE_S = 0.2  # a prefill worker that said it is busy is left alone for this long
UNLISTED_HEARTBEATS = 2
RECONNECT_S = 1.0  # ZeroMQ tries every 0.1 s
SAY_AGAIN_S = 1.0
GOODBYE_MS = 200
SILENT_S = 2.0  # a worker that says nothing for so long may come back on another connection


class Pool:
    """All workers of this gateway, and its control socket."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        gateway_id: str,
        models: Sequence[ModelIdentity],
        death_bound_s: float,
        clock: Callable[[], float] = time.monotonic,
        curve: Curve | None = None,
    ) -> None:
        self.gateway_id = gateway_id
        self.frames = FrameCounts()
        self.workers: dict[str, Worker] = {}
        self.on_change: list[Callable[[], None]] = []  # called when a request may find a place, or none any more
        self._models = {model.name: model for model in models}
        self._death_bound_s = death_bound_s
        self._clock = clock
        self._router = Router(context, address, self.frames, curve)
        self._drain_is_due = False
        self._stop = asyncio.Event()
        self._beat_task: asyncio.Task[None] | None = None
        self._turned_at = clock()  # the loop's last turn
        self._away_at = float("-inf")  # when it last came back from not having turned for long

    # --- running -------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self._router.address

    def start(self) -> asyncio.Task[None]:
        """Begin to listen. The returned task ends with `close`; if it fails, the gateway cannot go on."""
        asyncio.get_running_loop().add_reader(self._router.socket.fileno(), self.drain)
        self._beat_task = asyncio.create_task(self._beat(), name="pool heartbeat")
        return self._beat_task

    async def close(self) -> None:
        self._stop.set()
        if self._beat_task is not None:
            await asyncio.gather(self._beat_task, return_exceptions=True)
            asyncio.get_running_loop().remove_reader(self._router.socket.fileno())
        for worker in self.workers.values():
            self._router.send(worker.identity, RegistrationDenied("the gateway has stopped", fatal=False))
        self._router.close(GOODBYE_MS)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition that the workers bring about; False if that took longer than `timeout_s`."""
        deadline = self._clock() + timeout_s
        while not condition():
            if self._clock() > deadline:
                return False
            await self._pause()
        return True

    async def released(self, timeout_s: float) -> bool:
        """Wait until no worker lists anything of ours any more; False if that took longer than `timeout_s`."""
        before = {worker.id: worker.seq for worker in self.workers.values()}
        return await self.until(lambda: all(self._has_let_go(w, before) for w in self.workers.values()), timeout_s)

    @staticmethod
    def _has_let_go(worker: Worker, before: dict[str, int]) -> bool:
        beat = worker.heartbeat
        return beat is not None and beat.seen_seq > before.get(worker.id, 0) and not beat.live

    async def _pause(self) -> None:
        """One drain interval, or less when the pool is told to stop."""
        try:
            async with asyncio.timeout(DRAIN_INTERVAL_S):
                await self._stop.wait()
        except TimeoutError:
            return

    async def _beat(self) -> None:
        next_beat = self._turned_at = self._clock()
        while not self._stop.is_set():
            await self._pause()
            now = self._clock()
            if (away_s := now - self._turned_at) > self._death_bound_s / 2:
                # It was us who did not listen: nobody may be declared dead for that.
                for worker in self.workers.values():
                    worker.last_heard += away_s
                self._away_at = now
            self._turned_at = now
            self.drain()
            if now >= next_beat:
                next_beat = now + HEARTBEAT_INTERVAL_S
                for worker in list(self.workers.values()):
                    self._send_heartbeat(worker)
                self._move()
            self._bury(self._clock())

    def _send_heartbeat(self, worker: Worker) -> None:
        worker.seq += 1
        live = [(leg.request, leg.attempt) for leg in worker.legs.values()]
        self.send(worker, GatewayHeartbeat(worker.seq, live))

    def _bury(self, now: float) -> None:
        for worker in list(self.workers.values()):
            if worker.cut_off_at is not None and now - worker.cut_off_at > RECONNECT_S:
                self._forget(worker, "its connection is gone", died=not self._was_away)
            elif now - worker.last_heard > self._death_bound_s:
                self._forget(worker, f"silent for {now - worker.last_heard:.1f} s", died=True)

    @property
    def _was_away(self) -> bool:
        """This loop did not run for so long that workers may have given us up: that says nothing against requests."""
        now = self._clock()
        return now - self._turned_at > self._death_bound_s / 2 or now - self._away_at < self._death_bound_s

    # --- messages out --------------------------------------------------------------------------------------------

    def send(self, worker: Worker, message: Message) -> None:
        """Send, or find that the worker is gone: then all who have legs there are told."""
        if self.workers.get(worker.id) is not worker:
            return  # forgotten already, and its legs were told
        if self._router.send(worker.identity, message):
            worker.cut_off_at = None
        elif not self.address.startswith("tcp://"):
            self._forget(worker, "its connection is gone", died=True)
        elif worker.cut_off_at is None:
            log.warning("%s: its connection is gone; it has %g s to come back", worker.id, RECONNECT_S)
            worker.cut_off_at = self._clock()
        self._drain_soon()

    def _drain_soon(self) -> None:
        # Sending may swallow the edge that announces a message which came in meanwhile.
        if not self._drain_is_due:
            self._drain_is_due = True
            asyncio.get_running_loop().call_soon(self.drain)

    def _send_peers(self, model: str) -> None:
        decode = [
            Peer(r.worker, r.host, r.bulk_address, r.peer_address, r.links, r.device)
            for r in (worker.register for worker in self.by_role("decode", model))
        ]
        for worker in list(self.by_role("prefill", model)):
            worker.told_at = self._clock()
            self.send(worker, Peers(decode))

    def _say_again(self, worker: Worker, beat: WorkerHeartbeat) -> None:
        """What is said once may have been lost with a connection: say it again when the worker seems not to know."""
        if self._clock() - worker.told_at < SAY_AGAIN_S:
            return
        if worker.dismissed and not beat.draining:
            worker.told_at = self._clock()
            self.send(worker, Drain())
        decode = {w.id for w in self.by_role("decode", worker.model)}
        if worker.register.role == "prefill" and not decode <= {link.worker for link in beat.links}:
            self._send_peers(worker.model)

    # --- messages in ---------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take in everything that has arrived; in portions, so that a flood leaves the loop some air."""
        self._drain_is_due = False
        count = 0
        for received in self._router.receive():
            count += 1
            self._on_message(received)
        if count >= MAX_MESSAGES_PER_DRAIN:
            self._drain_soon()

    def _on_message(self, received: Received) -> None:
        message, sender = received.message, received.sender
        if isinstance(message, Register):
            self._on_register(sender, message)
            if message.worker in self.workers and self.workers[message.worker].identity == sender:
                self._router.trust(received.connection)
            else:
                self._router.blame(received.connection)
            return
        worker = self.workers.get(sender.rpartition("/")[0])
        if worker is None or worker.identity != sender:
            if isinstance(message, WorkerHeartbeat):
                self._router.send(sender, RegistrationDenied("not registered here", fatal=False))
            else:
                self.frames.drop("unregistered")
            self._router.blame(received.connection)
            return
        self._router.trust(received.connection)
        worker.last_heard = self._clock()
        match message:
            case WorkerHeartbeat():
                self._on_heartbeat(worker, message)
            case Tokens():
                self._on_tokens(worker, message)
            case Reserved() | Busy() | PromptLogprobs() | FirstTokens() | Failed() | Gone():
                self._deliver(worker, message.request, message.attempt, message)
            case Leaving():
                self._forget(worker, "it left", died=False, planned=True)
            case _:
                self.frames.drop("unexpected_message")

    def _on_register(self, sender: str, message: Register) -> None:
        if sender.rpartition("/")[0] != message.worker:
            self.frames.drop("identity")
            return
        now = self._clock()
        known = self.workers.get(message.worker)
        if known is not None:
            if sender != known.identity and self._is_alive(known, now):
                self.frames.drop("identity")  # somebody else; if not, the old connection is gone at the next try
                return
            known.identity, known.last_heard = sender, now
            self._router.send(sender, Registered(self.gateway_id, message.worker))
            return
        namesake = self._namesake(message)
        others = [w.register for w in self.workers.values() if w is not namesake and w.model == message.model]
        if text := refusal(message, self._models, others):
            log.error("refused %s: %s", message.worker, text)
            self._router.send(sender, RegistrationDenied(text[:4096], fatal=True))
            return
        if namesake is not None:
            what_to_do = succession(message, namesake.register, now - namesake.last_heard)
            if what_to_do == "refuse" and self._is_alive(namesake, now):
                text = f"a live worker has this name already: {namesake.id} (pid {namesake.register.pid})"
                self._router.send(sender, RegistrationDenied(text, fatal=True))
            if what_to_do != "replace":
                return  # undecided whether the old one lives: the newcomer asks again in a moment
            self._forget(namesake, f"replaced by {message.worker}", died=True)
        worker = Worker(sender, message, last_heard=now, registered_at=now)
        self.workers[worker.id] = worker
        log.info("registered %s worker %s of %s (pid %d)", message.role, worker.id, worker.model, message.pid)
        self.send(worker, Registered(self.gateway_id, worker.id))
        self._send_peers(worker.model)
        self._changed()

    def _changed(self) -> None:
        for tell in self.on_change:
            tell()

    def _is_alive(self, worker: Worker, now: float) -> bool:
        """Was it heard of just now, on a connection that still stands?"""
        registered = Registered(self.gateway_id, worker.id)  # it knows that already
        return now - worker.last_heard < SILENT_S and self._router.send(worker.identity, registered)

    def _namesake(self, message: Register) -> Worker | None:
        name = message.worker.partition("#")[0]
        return next((w for w in self.workers.values() if w.name == name), None)

    def _on_heartbeat(self, worker: Worker, message: WorkerHeartbeat) -> None:
        worker.heartbeat, worker.heartbeat_at = message, self._clock()
        worker.unlinked.clear()
        if message.draining:
            self.dismiss(worker)
        self._say_again(worker, message)
        live = set(message.live)
        for leg in list(worker.legs.values()):
            if (leg.request, leg.attempt) in live:
                leg.unlisted = 0
            elif leg.must_be_listed and leg.sent_at_seq is not None and message.seen_seq > leg.sent_at_seq:
                leg.unlisted += 1
                if leg.unlisted == UNLISTED_HEARTBEATS:
                    lost = Lost(f"{worker.name} does not know the attempt any more", died=False)
                    leg.owner.deliver(worker.id, leg.attempt, lost)
        self._changed()

    def _on_tokens(self, worker: Worker, message: Tokens) -> None:
        gone: set[tuple[str, int]] = set()
        now = self._clock()
        worker.pace.stepped(frozenset(item[0] for item in message.items), now)
        for at, (request, attempt, choice, index, token, finish) in enumerate(message.items):
            leg = worker.legs.get(request)
            if leg is None or leg.attempt != attempt:
                gone.add((request, attempt))
            else:
                worker.computed(leg, now)
                leg.owner.deliver(worker.id, attempt, NewToken(choice, index, token, finish, message.logprobs.get(at)))
        for request, attempt in gone:
            self.send(worker, Gone(request, attempt))

    def _deliver(self, worker: Worker, request: str, attempt: int, event: Answer) -> None:
        leg = worker.legs.get(request)
        if leg is not None and leg.attempt == attempt:
            if isinstance(event, FirstTokens):
                worker.computed(leg, self._clock())
                self._changed()
            leg.owner.deliver(worker.id, attempt, event)
        elif isinstance(event, Reserved | PromptLogprobs | FirstTokens):  # who says one of the others has let go
            self.send(worker, Gone(request, attempt))

    def _forget(self, worker: Worker, reason: str, *, died: bool, planned: bool = False) -> None:
        if self.workers.get(worker.id) is not worker:
            return
        del self.workers[worker.id]
        log.log(logging.WARNING if died else logging.INFO, "%s is gone: %s", worker.id, reason)
        # What it has never heard of cannot have killed it.
        num_heard = sum(leg.sent_at_seq is not None for leg in worker.legs.values())
        for leg in worker.legs.values():
            heard = leg.sent_at_seq is not None
            gone = f"{worker.name} is gone: {reason}"
            lost = Lost(gone, died=died and heard, planned=planned or not heard, alone=num_heard == 1)
            leg.owner.deliver(worker.id, leg.attempt, lost)
        if worker.register.role == "decode":
            self._send_peers(worker.model)
        self._changed()

    # --- draining ------------------------------------------------------------------------------------------------

    def dismiss(self, worker: Worker) -> None:
        """Place nothing more on this worker, and let it go when it has nothing left of ours."""
        if worker.dismissed:
            return
        worker.dismissed, worker.told_at = True, self._clock()
        log.info("%s drains, with %d attempts to finish or to move", worker.id, len(worker.legs))
        self.send(worker, Drain())
        if worker.register.role == "prefill":
            for leg in worker.legs.values():
                if leg.sent_at_seq is None:  # it has not heard of it yet, and would not take it
                    self._take_off(worker, leg)
        self._move()
        self._send_heartbeat(worker)
        self._changed()

    def _move(self) -> None:
        """Take attempts off draining decode workers, as many as others have room for."""
        for worker in self.by_role("decode"):
            if worker.draining and worker.legs:
                others = [w for w in self.by_role("decode", worker.model) if w.takes_work]
                for leg in movable(worker, others):
                    self._take_off(worker, leg)

    def _take_off(self, worker: Worker, leg: Leg) -> None:
        lost = Lost(f"{worker.name} drains", died=False, planned=True)
        leg.owner.deliver(worker.id, leg.attempt, lost)

    # --- legs ----------------------------------------------------------------------------------------------------

    def place(self, worker: Worker, leg: Leg) -> None:
        assert leg.request not in worker.legs, f"{leg.request} is at {worker.id} twice"
        worker.legs[leg.request] = leg

    def dispatch(self, worker: Worker, leg: Leg, message: Reserve | Prefill) -> None:
        """The leg's first message. From now on the worker should list it."""
        self.send(worker, message)  # if this finds the worker gone, the leg was never there
        leg.sent_at_seq = worker.seq
        leg.sent_at = self._clock()

    def remove(self, worker: Worker, leg: Leg, *, cancel: bool) -> None:
        """Take the leg off the worker; with `cancel` tell it, if it has heard of the leg at all."""
        if worker.legs.get(leg.request) is not leg:
            return
        del worker.legs[leg.request]
        if cancel and leg.sent_at_seq is not None:
            self.send(worker, Cancel(leg.request, leg.attempt))
        self._changed()

    # --- who is here ---------------------------------------------------------------------------------------------

    def of(self, model: str) -> list[Worker]:
        return [w for w in self.workers.values() if w.model == model]

    def by_role(self, role: str, model: str | None = None) -> Iterable[Worker]:
        return (w for w in self.workers.values() if w.register.role == role and model in (None, w.model))

    def is_free(self, prefill: Worker | None) -> bool:
        return prefill is None or self._clock() >= prefill.busy_until

    def mark_busy(self, worker_id: str) -> None:
        if (worker := self.workers.get(worker_id)) is not None:
            worker.busy_until = self._clock() + BUSY_PAUSE_S
