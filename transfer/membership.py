"""A worker's side of its tie to a gateway: register, heartbeats both ways, notice when the other is gone; and leave.

    REGISTERING ──Registered──▶ REGISTERED ──silence or "you are not registered"──▶ REGISTERING (new socket)

The tie owns its socket and nothing else. What a lost gateway had asked for is dropped by the worker, which learns of
it from `poll`: a `GatewayLost` event comes out between the messages, in order.

Leaving is agreed upon. A worker that drains (its user said so, or a gateway sent `Drain`) says it in its heartbeats,
and every gateway answers `Drain`: nothing new will come from there. It leaves when it holds nothing and no gateway
lists anything of it, which means too that whatever it sent last has arrived; or when its time to drain is up.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from .channel import Dealer, FrameCounts
from .errors import RegistrationRefused
from .keys import Curve
from .messages import (
    Drain,
    GatewayHeartbeat,
    Leaving,
    Message,
    Register,
    Registered,
    RegistrationDenied,
    WorkerHeartbeat,
)

log = logging.getLogger(__name__)

REGISTER_EVERY_S = 0.5
HEARTBEAT_EVERY_S = 0.2
UNANSWERED_S = 10.0
FAREWELL_S = 1.0  # a gateway that does not answer a draining worker, of which it has nothing, is not waited for

Attempt = tuple[str, int]


def new_worker_id(name: str) -> str:
    """(name, incarnation) as one string: a restarted or once frozen worker is somebody else."""
    return f"{name}#{secrets.token_hex(4)}"


@dataclass(frozen=True)
class GatewayLost:
    """The gateway is silent or has forgotten this worker: everything it asked for is unwanted."""


@dataclass(frozen=True)
class Unwanted:
    """The gateway listed its live attempts twice without this one."""

    attempt: Attempt


class GatewayTie:
    """One worker's connection to one gateway."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        counts: FrameCounts,
        death_bound_s: float,
        worker: str,
        curve: Curve | None = None,
    ) -> None:
        self.address = address
        self.registered = False
        self.draining = False  # the worker is: it says so, and does not register again
        self.dismissed = False  # the gateway has said Drain: it sends nothing new
        self._context = context
        self._counts = counts
        self._death_bound_s = death_bound_s
        self._worker = worker
        self._curve = curve
        self._connections = 0
        self._dealer = self._connect()
        self._heard_at = self._complained_at = time.monotonic()
        self._register_at = 0.0
        self._heartbeat_at = 0.0
        self._seen_seq = 0
        self._unlisted: set[Attempt] = set()
        self._wanted: set[Attempt] | None = None  # as the gateway listed it last, once it has dismissed the worker

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._dealer.socket

    @property
    def seen_seq(self) -> int:
        return self._seen_seq

    @property
    def has_let_go(self) -> bool:
        """The gateway sends nothing new and wants nothing more (or there is no gateway)."""
        return not self.registered or (self.dismissed and self._wanted == set())

    def _connect(self) -> Dealer:
        self._connections += 1
        return Dealer(self._context, self.address, f"{self._worker}/{self._connections}", self._counts, self._curve)

    def _reset(self, why: str) -> None:
        if self.registered:
            log.warning("gateway %s: %s; registering again", self.address, why)
        self._dealer.close()
        self._dealer = self._connect()
        self.registered = False
        self._register_at = 0.0
        self.dismissed = False
        self._seen_seq = 0
        self._unlisted.clear()
        self._wanted = None
        self._heard_at = time.monotonic()

    def reincarnate(self, worker: str) -> None:
        """Go on under a new identity; nothing sent to the old one will be taken."""
        self._worker = worker
        self._reset("this worker was away for too long")

    def send(self, message: Message) -> None:
        """Send in order; dropped while not registered (the gateway has no use for it then)."""
        if self.registered:
            self._dealer.send(message)

    def poll(self, live: Callable[[], set[Attempt]]) -> Iterator[Message | GatewayLost | Unwanted]:
        """What has arrived for the worker. `live`: the attempts of this gateway the worker holds now."""
        for received in self._dealer.receive():
            self._heard_at = time.monotonic()
            match received.message:
                case Registered(gateway=gateway, worker=worker):
                    if worker == self._worker and not self.registered:
                        self.registered = True
                        self._complained_at = self._heard_at
                        log.info("registered with %s as %s", gateway, worker)
                case RegistrationDenied(reason=reason, fatal=fatal):
                    if fatal:
                        raise RegistrationRefused(reason)
                    if self.registered:
                        self._reset(reason)
                        yield GatewayLost()
                        return
                case Drain():
                    self.dismissed = True
                case GatewayHeartbeat() as heartbeat:
                    if self.dismissed:
                        self._wanted = set(heartbeat.live)
                    yield from self._compare(heartbeat, live())
                case message:
                    yield message
        if self.registered and (time.monotonic() - self._heard_at > self._death_bound_s or self._dealer.overfull):
            self._reset("silent")
            yield GatewayLost()

    def _compare(self, heartbeat: GatewayHeartbeat, live: set[Attempt]) -> Iterator[Unwanted]:
        """Messages come in order, so what is not listed was let go before the list was made."""
        self._seen_seq = heartbeat.seq
        missing = live - set(heartbeat.live)
        for attempt in missing & self._unlisted:
            yield Unwanted(attempt)
        self._unlisted = missing

    def tick(self, register: Callable[[], Register], heartbeat: Callable[[], WorkerHeartbeat]) -> None:
        """Send what is due now."""
        now = time.monotonic()
        if not self.registered:
            if now >= self._register_at and not self.draining:
                self._register_at = now + REGISTER_EVERY_S
                self._complain(now)
                if self._dealer.pending == 0:
                    self._dealer.send(register())
                else:
                    self._dealer.flush()
        elif now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_EVERY_S
            self._dealer.send(heartbeat())
        else:
            self._dealer.flush()

    def _complain(self, now: float) -> None:
        """Keys that do not fit look just like a gateway that is not there; say so from time to time."""
        if now - self._complained_at > UNANSWERED_S:
            self._complained_at = now
            keys = "with --keys" if self._curve is not None else "without --keys"
            log.warning("gateway %s does not answer: is it there, and does it want workers %s?", self.address, keys)

    def hasten_heartbeat(self) -> None:
        """The next tick sends a heartbeat: something worth telling has changed."""
        self._heartbeat_at = 0.0

    def close(self) -> None:
        self._dealer.close(linger_ms=200)


class Membership:
    """All gateways of one worker, whose request is whose, and which incarnation this is.

    A worker whose loop was away for longer than the death bound is presumed dead by everybody; it drops all work and
    goes on under a new incarnation.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        name: str,
        gateways: Sequence[str],
        counts: FrameCounts,
        death_bound_s: float,
        drain_timeout_s: float = 30.0,
        curve: Curve | None = None,
    ) -> None:
        self.worker = new_worker_id(name)
        self.owner: dict[Attempt, GatewayTie] = {}
        self._name = name
        self._death_bound_s = death_bound_s
        self._drain_timeout_s = drain_timeout_s
        self._drain_asked = False
        self._draining_since: float | None = None
        self._polled_at = time.monotonic()
        self.ties = [GatewayTie(context, address, counts, death_bound_s, self.worker, curve) for address in gateways]

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [tie.socket for tie in self.ties]

    @property
    def registered(self) -> bool:
        return any(tie.registered for tie in self.ties)

    def drain(self) -> None:
        """Take nothing new, and leave when nothing is left (safe in a signal handler)."""
        self._drain_asked = True

    @property
    def draining(self) -> bool:
        return self._draining_since is not None

    @property
    def may_leave(self) -> bool:
        """This worker drains, and nobody would miss it; or its time is up, and what it holds goes on elsewhere."""
        if self._draining_since is None:
            return False
        elapsed_s = time.monotonic() - self._draining_since
        if elapsed_s > self._drain_timeout_s:
            log.warning("leaving with %d attempts unfinished after %.1f s", len(self.owner), elapsed_s)
            return True
        if self.owner:
            return False
        return all(tie.has_let_go or (not tie.dismissed and elapsed_s > FAREWELL_S) for tie in self.ties)

    def _begin_to_drain(self) -> None:
        if self._draining_since is None and (self._drain_asked or any(tie.dismissed for tie in self.ties)):
            self._draining_since = time.monotonic()
            log.info("draining: %d attempts to finish or to hand over, nothing new is taken", len(self.owner))
            for tie in self.ties:
                tie.draining = True
                tie.hasten_heartbeat()

    def owned_by(self, tie: GatewayTie) -> set[Attempt]:
        return {attempt for attempt, owner in self.owner.items() if owner is tie}

    def poll(self) -> Iterator[tuple[GatewayTie, Message | GatewayLost | Unwanted]]:
        """What has arrived from any gateway, and what became of the gateways themselves."""
        now = time.monotonic()
        away_s, self._polled_at = now - self._polled_at, now
        if away_s > self._death_bound_s:
            self.worker = new_worker_id(self._name)
            log.warning("away for %.1f s: dropping all work, now %s", away_s, self.worker)
            for tie in self.ties:
                tie.reincarnate(self.worker)
                yield tie, GatewayLost()
        for tie in self.ties:
            for event in tie.poll(lambda tie=tie: self.owned_by(tie)):  # type: ignore[misc]
                yield tie, event
        self._begin_to_drain()

    def send(self, attempt: Attempt, message: Message) -> None:
        """To the gateway this attempt belongs to, if it is still wanted."""
        if (tie := self.owner.get(attempt)) is not None:
            tie.send(message)

    def tick(
        self, register: Callable[[], Register], heartbeat: Callable[[GatewayTie], WorkerHeartbeat]
    ) -> None:
        for tie in self.ties:
            tie.tick(register, lambda tie=tie: heartbeat(tie))  # type: ignore[misc]

    def hasten_heartbeat(self) -> None:
        for tie in self.ties:
            tie.hasten_heartbeat()

    def say_goodbye(self) -> None:
        """This worker leaves of its own will. One that crashes does not say so, and is counted as dead."""
        for tie in self.ties:
            tie.send(Leaving(self.worker))

    def close(self) -> None:
        for tie in self.ties:
            tie.close()
