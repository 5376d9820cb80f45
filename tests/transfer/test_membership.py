"""A worker's ties to its gateways; the test is the gateways."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pdserve.transfer.channel import FrameCounts, Router
from pdserve.transfer.layout import KVLayout, LayerShape
from pdserve.transfer.membership import GatewayLost, GatewayTie, Membership
from pdserve.transfer.messages import (
    Drain,
    GatewayHeartbeat,
    Leaving,
    Message,
    Register,
    Registered,
    RegistrationDenied,
    WorkerHeartbeat,
)

LAYOUT = KVLayout("f" * 64, "float32", (LayerShape(1, 4, 4),))
WAIT_S = 20.0


class Gateway:
    """One gateway's socket, which answers what it must unless told not to."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self.router = Router(context, address, FrameCounts())
        self.address = self.router.address
        self.identity = ""
        self.seen: list[Message] = []
        self.live: list[tuple[str, int]] = []
        self.dismissing = True
        self.seq = 0

    def pump(self) -> None:
        for received in self.router.receive():
            self.seen.append(received.message)
            if isinstance(received.message, Register):
                self.identity = received.sender
                self.send(Registered("gateway#00000000", received.message.worker))
            if isinstance(received.message, WorkerHeartbeat) and received.message.draining and self.dismissing:
                self.send(Drain())
        if self.identity:
            self.seq += 1
            self.send(GatewayHeartbeat(self.seq, self.live))

    def send(self, message: Message) -> None:
        self.router.send(self.identity, message)

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.seen if isinstance(message, kind)]


class Worker:
    """The loop of a worker, as far as membership goes."""

    def __init__(self, context: zmq.Context, gateways: list[Gateway], **options: float) -> None:
        bounds = {"death_bound_s": 5.0, **options}
        addresses = [gateway.address for gateway in gateways]
        self.members = Membership(context, "w", addresses, FrameCounts(), **bounds)
        self.gateways = gateways
        self.events: list[tuple[int, object]] = []

    def turn(self) -> None:
        for gateway in self.gateways:
            gateway.pump()
        for tie, event in self.members.poll():
            self.events.append((self.members.ties.index(tie), event))
            if isinstance(event, GatewayLost):
                for attempt in self.members.owned_by(tie):
                    del self.members.owner[attempt]
        self.members.tick(self._register, self._heartbeat)

    def _register(self) -> Register:
        return Register(self.members.worker, "prefill", "m", LAYOUT, "h", "", "", ["zmq"], 16, 64, 1000, 8, 1)

    def _heartbeat(self, tie: GatewayTie) -> WorkerHeartbeat:
        live = sorted(self.members.owned_by(tie))
        return WorkerHeartbeat(tie.seen_seq, live, True, 1, 0, 0, 0, 0, self.members.draining, [], [])

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            self.turn()

    def lives_on(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert not self.members.may_leave
            self.turn()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def gateways(context: zmq.Context, tmp_path: Path) -> list[Gateway]:
    return [Gateway(context, f"ipc://{tmp_path}/{name}") for name in "ab"]


def joined(context: zmq.Context, gateways: list[Gateway], **options: float) -> Worker:
    worker = Worker(context, gateways, **options)
    worker.until(lambda: all(gateway.of(WorkerHeartbeat) for gateway in gateways))
    return worker


def test_one_gateways_word_is_passed_on_to_the_others(context: zmq.Context, gateways: list[Gateway]) -> None:
    worker = joined(context, gateways)
    first, second = gateways
    first.send(Drain())
    worker.until(lambda: second.seen and second.seen[-1].draining)
    worker.until(lambda: worker.members.may_leave)


def test_every_gateway_must_have_let_go_before_a_worker_leaves(context: zmq.Context, gateways: list[Gateway]) -> None:
    worker = joined(context, gateways)
    gateways[1].live = [("r", 1)]
    worker.members.drain()
    worker.lives_on(1.5)
    gateways[1].live = []
    worker.until(lambda: worker.members.may_leave)


def test_what_is_held_is_finished_first(context: zmq.Context, gateways: list[Gateway]) -> None:
    worker = joined(context, gateways)
    worker.members.owner["r", 1] = worker.members.ties[0]
    gateways[0].live = [("r", 1)]
    worker.members.drain()
    worker.lives_on(1.5)
    del worker.members.owner["r", 1]
    gateways[0].live = []
    worker.until(lambda: worker.members.may_leave)


def test_the_time_to_drain_is_bounded_whatever_is_still_held(context: zmq.Context, gateways: list[Gateway]) -> None:
    worker = joined(context, gateways, drain_timeout_s=0.5)
    worker.members.owner["r", 1] = worker.members.ties[0]
    gateways[0].live = [("r", 1)]
    started = time.monotonic()
    worker.members.drain()
    worker.until(lambda: worker.members.may_leave)
    assert time.monotonic() - started > 0.5


def test_a_gateway_without_an_answer_holds_up_nobody_who_has_nothing_of_it(
    context: zmq.Context, gateways: list[Gateway]
) -> None:
    worker = joined(context, gateways)
    gateways[0].dismissing = False
    started = time.monotonic()
    worker.members.drain()
    worker.until(lambda: worker.members.may_leave)
    assert time.monotonic() - started > 0.9, "it had the time to answer"


def test_a_worker_that_was_asked_before_it_was_registered_leaves_without_a_word(
    context: zmq.Context, gateways: list[Gateway]
) -> None:
    worker = Worker(context, gateways)
    worker.members.drain()
    list(worker.members.poll())
    assert worker.members.may_leave
    worker.turn()
    assert not gateways[0].of(Register)


def test_a_gateway_that_stops_is_lost_at_once_and_its_work_alone_is_dropped(
    context: zmq.Context, gateways: list[Gateway]
) -> None:
    worker = joined(context, gateways)
    first, second = worker.members.ties
    worker.members.owner |= {("a", 1): first, ("b", 1): second}
    gateways[0].live, gateways[1].live = [("a", 1)], [("b", 1)]
    gateways[0].send(RegistrationDenied("the gateway has stopped", fatal=False))
    worker.until(lambda: any(isinstance(event, GatewayLost) for _, event in worker.events))
    assert worker.members.owner == {("b", 1): second}
    assert [index for index, event in worker.events if isinstance(event, GatewayLost)] == [0]


def test_a_draining_worker_does_not_register_again(context: zmq.Context, gateways: list[Gateway]) -> None:
    worker = joined(context, gateways)
    gateways[1].live = [("r", 1)]
    worker.members.drain()
    worker.until(lambda: gateways[0].seen[-1].draining)
    before = len(gateways[0].of(Register))
    gateways[0].send(RegistrationDenied("the gateway has stopped", fatal=False))
    worker.lives_on(1.5)
    assert len(gateways[0].of(Register)) == before


def test_a_worker_that_was_away_past_the_bound_registers_as_somebody_else(
    context: zmq.Context, gateways: list[Gateway]
) -> None:
    worker = joined(context, gateways, death_bound_s=0.3)
    old = worker.members.worker
    worker.members.owner["r", 1] = worker.members.ties[0]
    time.sleep(0.5)
    worker.turn()
    assert worker.members.worker != old
    assert worker.members.worker.startswith("w#")
    assert not worker.members.owner
    worker.until(lambda: all(g.of(Register)[-1].worker == worker.members.worker for g in gateways))
    assert all(gateway.identity.startswith(worker.members.worker) for gateway in gateways)


def test_the_last_word_is_said_to_every_gateway(context: zmq.Context, gateways: list[Gateway]) -> None:
    worker = joined(context, gateways)
    worker.members.say_goodbye()
    worker.members.close()
    deadline = time.monotonic() + WAIT_S
    while not all(gateway.of(Leaving) for gateway in gateways):
        assert time.monotonic() < deadline
        for gateway in gateways:
            gateway.pump()
