"""Membership over real ZeroMQ: who is let in, who is found dead, and who is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.gateway.membership import succession
from pdserve.gateway.serving import decode_alone, pairs
from pdserve.gateway.worker import Leg, Lost, NewToken
from pdserve.transfer.channel import Dealer, FrameCounts
from pdserve.transfer.messages import (
    Drain,
    Gone,
    Peers,
    Register,
    Registered,
    Reserve,
    Tokens,
)
from pdserve.transfer.sampling_params import SamplingParams
from tests.gateway.fake_worker import FakeDecode, FakePrefill, layout
from tests.gateway.harness import System, running_system, until


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with running_system(tmp_path) as system:
        yield system


class Owner:
    def __init__(self) -> None:
        self.events: list[object] = []

    def deliver(self, worker: str, attempt: int, event: object) -> None:
        self.events.append(event)


def place(system: System, worker: FakeDecode, *, dispatched: bool = True) -> tuple[Owner, Leg]:
    owner = Owner()
    known = system.pool.workers[worker.worker]
    leg = Leg(owner, "r-1", 1, 0)
    system.pool.place(known, leg)
    if dispatched:
        reserve = Reserve("r-1", 1, [1], [[]], [False], SamplingParams(5, 1), "", "auto", "", "", 0)
        system.pool.dispatch(known, leg, reserve)
    return owner, leg


async def test_registered_worker_serves_only_after_a_heartbeat_that_says_it_is_ready(system: System) -> None:
    decode = system.decode(ready=False)
    await until(lambda: decode.registered)
    await until(lambda: system.pool.workers[decode.worker].heartbeat)
    assert not system.dispatcher.can_serve
    decode.ready = True
    await until(lambda: system.dispatcher.can_serve)


async def test_prefill_workers_are_told_of_every_change_among_decode_workers(system: System) -> None:
    decode = system.decode("d0")
    await system.ready(1)
    prefill = system.prefill()
    await until(lambda: [p.worker for p in prefill.of(Peers)[-1].decode] == [decode.worker] if prefill.of(Peers) else 0)
    second = system.decode("d1")
    await until(lambda: {p.worker for p in prefill.of(Peers)[-1].decode} == {decode.worker, second.worker})
    decode.leave()
    await until(lambda: [p.worker for p in prefill.of(Peers)[-1].decode] == [second.worker])


async def test_only_linked_pairs_serve_and_decode_alone_where_nothing_is_linked(system: System) -> None:
    decode = system.decode()
    await system.ready(1)
    assert [(d.id, p) for d, p in pairs(system.pool.of("m"), alone=True)] == [(decode.worker, None)]
    assert pairs(system.pool.of("m"), alone=False) == []
    prefill = system.prefill()
    await system.linked(1)
    assert [(d.id, p and p.id) for d, p in pairs(system.pool.of("m"), alone=True)] == [(decode.worker, prefill.worker)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "other"}, ["other", "'m'"]),
        ({"layout": layout("a" * 64)}, ["/models/m", "a" * 12, "f" * 12]),
    ],
)
async def test_worker_of_another_model_is_refused_for_good_in_words(
    system: System, options: dict[str, object], words: list[str]
) -> None:
    worker = system.decode(**options)
    await until(lambda: worker.denied)
    assert worker.denied is not None
    assert worker.denied.fatal
    assert all(word in worker.denied.reason for word in [worker.worker, *words]), worker.denied.reason


@pytest.mark.parametrize(
    ("options", "words"),
    [({"dtype": "float16"}, ("float16", "float32")), ({"quantization": "int8"}, ("quantization", "int8", "none"))],
)
async def test_worker_whose_kv_differs_from_a_registered_one_is_refused_naming_both(
    system: System, options: dict[str, str], words: tuple[str, ...]
) -> None:
    first = system.decode()
    await system.ready(1)
    second = system.prefill(layout=layout(**options))
    await until(lambda: second.denied)
    assert second.denied is not None
    reason = second.denied.reason
    assert all(word in reason for word in (first.worker, second.worker, *words)), reason


async def test_process_that_woke_up_anew_takes_its_own_name_back_even_if_its_old_self_was_just_heard(
    tmp_path: Path,
) -> None:
    async with running_system(tmp_path, death_bound_s=60) as system:
        first = system.decode("same", pid=77)
        await system.ready(1)
        second = system.decode("same", pid=77)
        await asyncio.sleep(0.5)
        assert second.denied is None
        first.frozen = True
        await until(lambda: second.registered)
        assert list(system.pool.workers) == [second.worker]


@pytest.mark.parametrize(
    ("silence_s", "pid", "verdict"),
    [(0.1, 2, "refuse"), (0.5, 2, "wait"), (1.0, 2, "replace"), (0.1, 1, "wait"), (1.0, 1, "replace")],
)
def test_who_succeeds_a_namesake_depends_on_its_silence_and_on_whose_process_it_was(
    silence_s: float, pid: int, verdict: str
) -> None:
    old = register("decode-0#00000001", pid=1)
    assert succession(register("decode-0#00000002", pid=pid), old, silence_s) == verdict


def register(worker: str, pid: int) -> Register:
    return Register(worker, "decode", "m", layout(), "h", "ipc:///b", "ipc:///c", ["zmq"], 16, 64, 1000, 8, pid)


async def test_second_worker_with_the_name_of_a_beating_one_is_refused(system: System) -> None:
    first = system.decode("same")
    await system.ready(1)
    second = system.decode("same")
    await until(lambda: second.denied)
    assert second.denied is not None
    assert second.denied.fatal
    assert list(system.pool.workers) == [first.worker]


async def test_new_incarnation_replaces_a_silent_one_before_the_death_bound(tmp_path: Path) -> None:
    async with running_system(tmp_path, death_bound_s=60) as system:
        first = system.decode("same")
        await system.ready(1)
        owner, _ = place(system, first)
        first.frozen = True
        await asyncio.sleep(0.5)
        second = system.decode("same")
        await until(lambda: second.registered)
        assert list(system.pool.workers) == [second.worker]
        assert any(isinstance(event, Lost) and event.died for event in owner.events)


async def test_silent_worker_is_dead_after_the_bound_and_its_owners_are_told(system: System) -> None:
    decode = system.decode()
    await system.ready(1)
    owner, _ = place(system, decode)
    decode.frozen = True
    known = system.pool.workers[decode.worker]
    await until(lambda: decode.worker not in system.pool.workers)
    assert time.monotonic() - known.last_heard > 1.0, "the bound of these tests is one second"
    assert [event.died for event in owner.events if isinstance(event, Lost)] == [True]


async def test_killed_worker_is_found_dead_at_the_next_heartbeat_not_at_the_bound(tmp_path: Path) -> None:
    async with running_system(tmp_path, death_bound_s=60) as system:
        decode = system.decode()
        await system.ready(1)
        owner, _ = place(system, decode)
        decode.kill()
        await until(lambda: decode.worker not in system.pool.workers)
        assert [event.died for event in owner.events if isinstance(event, Lost)] == [True]


async def test_leaving_worker_is_forgotten_at_once_and_did_not_die(system: System) -> None:
    decode = system.decode()
    await system.ready(1)
    owner, _ = place(system, decode)
    decode.leave()
    await until(lambda: not system.pool.workers)
    (lost,) = [event for event in owner.events if isinstance(event, Lost)]
    assert (lost.died, lost.planned) == (False, True)


async def test_woken_worker_that_was_given_up_is_told_to_register_afresh(system: System) -> None:
    decode = system.decode()
    await system.ready(1)
    decode.frozen = True
    await until(lambda: not system.pool.workers)
    decode.frozen = False
    await until(lambda: decode.denied)
    assert decode.denied is not None
    assert not decode.denied.fatal


async def test_attempt_that_a_worker_does_not_list_twice_is_lost(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    owner, _ = place(system, decode)
    await until(lambda: ("r-1", 1) in decode.live)
    await asyncio.sleep(0.5)
    assert owner.events == [], "as long as it is listed, it lives"
    decode.live.clear()
    await until(lambda: owner.events)
    assert [event.died for event in owner.events if isinstance(event, Lost)] == [False]
    await asyncio.sleep(0.3)
    assert len(owner.events) == 1, "it is said once"


async def test_one_heartbeat_without_the_attempt_does_not_make_it_lost(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    owner, leg = place(system, decode)
    await until(lambda: decode.live)
    await until(lambda: decode._seen_seq > leg.sent_at_seq)
    decode.beating = False
    live = set(decode.live)
    for listed in (set(), live, set(), live):
        decode.live = listed
        decode.beat()
    await asyncio.sleep(0.2)
    assert owner.events == []


async def test_heartbeats_written_before_the_attempt_arrived_do_not_count_against_it(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    decode.beating = False
    known = system.pool.workers[decode.worker]
    before = known.seq
    owner, _ = place(system, decode)
    heartbeat = known.heartbeat
    for _ in range(5):
        decode._seen_seq = before
        decode.beat()
    await until(lambda: known.heartbeat is not heartbeat)
    await asyncio.sleep(0.1)
    assert owner.events == []


async def test_nobody_is_declared_dead_because_the_gateway_itself_was_away(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    owner, _ = place(system, decode)
    decode.beating = False  # else its heartbeat may come in before anybody has looked at the clock
    time.sleep(1.5)
    await asyncio.sleep(0.3)
    assert list(system.pool.workers) == [decode.worker]
    assert owner.events == []


async def test_attempt_that_was_never_sent_is_not_missed(system: System) -> None:
    decode = system.decode()
    await system.ready(1)
    owner, leg = place(system, decode, dispatched=False)
    await asyncio.sleep(0.6)
    assert owner.events == []
    system.pool.remove(system.pool.workers[decode.worker], leg, cancel=True)
    await asyncio.sleep(0.1)
    assert {m.kind for m in decode.received} <= {"Registered", "GatewayHeartbeat"}, "nothing to cancel there"


async def test_gateway_lists_to_each_worker_exactly_what_is_placed_there(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    _, leg = place(system, decode)
    await until(lambda: decode._wanted == {("r-1", 1)})
    system.pool.remove(system.pool.workers[decode.worker], leg, cancel=False)
    await until(lambda: decode._wanted == set())


async def test_tokens_of_unknown_or_old_attempts_are_answered_gone(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    owner, _ = place(system, decode)
    items = [("r-1", 1, 0, 0, 7, ""), ("r-1", 2, 0, 0, 7, ""), ("r-9", 1, 0, 0, 7, ""), ("r-9", 1, 0, 1, 7, "")]
    decode.dealer.send(Tokens(items))
    await until(lambda: len(decode.of(Gone)) == 2)
    assert {(m.request, m.attempt) for m in decode.of(Gone)} == {("r-1", 2), ("r-9", 1)}
    assert owner.events == [NewToken(0, 0, 7, "")]


async def test_garbage_and_forged_identities_are_counted_and_change_nothing(system: System) -> None:
    decode = system.decode()
    await system.ready(1)
    forger = Dealer(system.context, system.pool.address, "someone#00000000/1", FrameCounts())
    decode_twin = FakeDecode(system.context, system.pool.address, "twin")
    forger.send(Registered("a#00000000", "b#00000000"))
    for parts in ([b"\x80garbage"], [b""], [b"a", b"b", b"c"]):
        forger.socket.send_multipart(parts)
    decode_twin.worker = "stolen#12345678"  # not the identity of its connection
    decode_twin.register()
    dropped = system.pool.frames.dropped

    def counted() -> bool:
        for dealer in (forger, decode_twin.dealer):
            dealer.flush()  # what was written before the connection stood
        return min(dropped[reason] for reason in ("identity", "unregistered", "parts", "checksum")) > 0

    await until(counted)
    assert list(system.pool.workers) == [decode.worker]
    forger.close()
    decode_twin.kill()


async def test_repeated_registration_of_the_same_incarnation_keeps_its_work(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    owner, leg = place(system, decode)
    decode.register()
    await until(lambda: len(decode.of(Registered)) == 2)
    assert system.pool.workers[decode.worker].legs == {"r-1": leg}
    assert owner.events == []


async def test_released_waits_for_workers_to_confirm_that_nothing_is_left(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    _, leg = place(system, decode)
    await until(lambda: decode.live)
    assert not await system.pool.released(0.3)
    system.pool.remove(system.pool.workers[decode.worker], leg, cancel=True)
    assert await system.pool.released(20.0)
    assert decode.live == set()


async def test_prefill_busy_pause_ends_by_itself(system: System) -> None:
    await system.pair()
    prefill = next(w for w in system.workers if isinstance(w, FakePrefill))
    system.pool.mark_busy(prefill.worker)
    known = system.pool.workers[prefill.worker]
    assert not system.pool.is_free(known)
    await until(lambda: system.pool.is_free(known))


@pytest.mark.parametrize("heard", [True, False])
async def test_only_an_attempt_that_the_dead_worker_had_heard_of_counts_against_the_request(
    system: System, heard: bool
) -> None:
    decode = system.decode()
    await system.ready(1)
    owner, _ = place(system, decode, dispatched=heard)
    decode.kill()
    await until(lambda: owner.events)
    (lost,) = owner.events
    assert isinstance(lost, Lost)
    assert (lost.died, lost.planned) == (heard, not heard)


# --- draining ----------------------------------------------------------------------------------------------------


async def test_draining_worker_is_told_so_and_nothing_more_is_placed_on_it(system: System) -> None:
    first = system.decode("d0")
    second = system.decode("d1")
    await system.ready(2)
    first.draining = True
    await until(lambda: first.of(Drain))
    assert [d.id for d, _ in decode_alone(system.pool.of("m"))] == [second.worker]
    assert [d.id for d, _ in pairs(system.pool.of("m"), alone=True)] == [second.worker]
    await asyncio.sleep(0.5)
    assert len(first.of(Drain)) == 1
    assert second.of(Drain) == []
    assert system.pool.workers[first.worker].state == "draining"


async def test_gateway_asked_to_drain_a_worker_places_nothing_on_it_before_the_worker_has_even_heard(
    system: System,
) -> None:
    decode = system.decode()
    await system.ready(1)
    decode.frozen = True
    system.pool.dismiss(system.pool.workers[decode.worker])
    assert decode_alone(system.pool.of("m")) == []
    decode.frozen = False
    await until(lambda: decode.of(Drain))


async def test_draining_prefill_worker_keeps_what_it_has_and_loses_what_it_has_not_heard_of(system: System) -> None:
    await system.pair()
    prefill = next(w for w in system.workers if isinstance(w, FakePrefill))
    known = system.pool.workers[prefill.worker]
    begun, waiting = Owner(), Owner()
    for owner, name in ((begun, "r-1"), (waiting, "r-2")):
        system.pool.place(known, Leg(owner, name, 1, 0))
    known.legs["r-1"].sent_at_seq = known.seq + 1_000_000
    prefill.draining = True
    await until(lambda: waiting.events)
    assert [(e.planned, e.died) for e in waiting.events] == [(True, False)]
    await asyncio.sleep(0.3)
    assert begun.events == []


async def test_last_decode_worker_keeps_its_streams_when_it_drains_until_another_one_joins(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    owner, _ = place(system, decode)
    await until(lambda: decode.live)
    decode.draining = True
    await until(lambda: decode.of(Drain))
    await asyncio.sleep(0.5)
    assert owner.events == []
    system.decode("late")
    await until(lambda: owner.events)
    assert [(e.planned, e.died) for e in owner.events] == [(True, False)]


async def test_draining_takes_off_no_more_than_others_have_room_for_and_the_rest_when_they_have(
    system: System,
) -> None:
    leaving = system.decode("d0", answering=False)
    other = system.decode("d1", answering=False, max_sequences=2)
    await system.ready(2)
    owners = [Owner() for _ in range(3)]
    known, room = system.pool.workers[leaving.worker], system.pool.workers[other.worker]
    legs = [Leg(owner, f"r-{i}", 1, 0) for i, owner in enumerate(owners)]
    for leg in legs:
        system.pool.place(known, leg)
    system.pool.dismiss(known)
    assert [len(owner.events) for owner in owners] == [1, 1, 0]
    for leg in legs[:2]:
        system.pool.remove(known, leg, cancel=False)
        system.pool.place(room, leg)
    await asyncio.sleep(0.5)
    assert owners[2].events == []
    system.pool.remove(room, legs[0], cancel=False)
    await until(lambda: owners[2].events)


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens", "max_tokens", "moves"),
    [(10, 160, 160, True), (10, 161, 161, False), (10, 100, 161, False)],
    ids=["fits", "no_room_now", "never_fits"],
)
async def test_attempt_moves_only_to_a_worker_whose_pool_can_hold_it(
    system: System, num_blocks: int, num_tokens: int, max_tokens: int, moves: bool
) -> None:
    leaving = system.decode("d0")
    system.decode("d1", num_blocks=num_blocks)
    await system.ready(2)
    owner = Owner()
    known = system.pool.workers[leaving.worker]
    system.pool.place(known, Leg(owner, "r-1", 1, 0, num_tokens, max_tokens))
    system.pool.dismiss(known)
    assert bool(owner.events) == moves


# --- connections over TCP ----------------------------------------------------------------------------------------


async def test_worker_whose_tcp_connection_was_cut_keeps_its_work_if_it_is_back_in_time(tmp_path: Path) -> None:
    async with (
        running_system(tmp_path, address="tcp://127.0.0.1:*", death_bound_s=60) as system,
        Cable(system) as cable,
    ):
        decode = system.decode(answering=False, address=cable.address)
        await system.ready(1)
        owner, _ = place(system, decode)
        await until(lambda: ("r-1", 1) in decode.live)
        known = system.pool.workers[decode.worker]
        cable.open = False
        cable.cut()
        await until(lambda: known.cut_off_at is not None)
        cable.open = True
        await until(lambda: known.cut_off_at is None)
        beat = known.heartbeat
        await until(lambda: known.heartbeat is not beat)
        await asyncio.sleep(1.5)
        assert owner.events == []
        assert list(system.pool.workers.values()) == [known]


async def test_what_is_said_once_is_said_again_to_a_worker_that_seems_not_to_know(system: System) -> None:
    decode, prefill = await system.pair()
    prefill.decode_links = []
    before = len(prefill.of(Peers))
    await until(lambda: len(prefill.of(Peers)) > before)
    await system.linked(1)
    system.pool.dismiss(system.pool.workers[decode.worker])
    await until(lambda: decode.draining)
    decode.draining = False
    await until(lambda: len(decode.of(Drain)) == 2)
    await asyncio.sleep(1.5)
    assert (len(prefill.of(Peers)), len(decode.of(Drain))) == (before + 1, 2), "and not once more than that"


async def test_worker_whose_tcp_connection_stays_cut_is_dead_long_before_the_bound(tmp_path: Path) -> None:
    async with running_system(tmp_path, address="tcp://127.0.0.1:*", death_bound_s=60) as system:
        decode = system.decode()
        await system.ready(1)
        owner, _ = place(system, decode)
        decode.kill()
        await until(lambda: decode.worker not in system.pool.workers)
        assert [event.died for event in owner.events if isinstance(event, Lost)] == [True]


class Cable:
    """A TCP connection to the gateway that a test can cut: both ends notice, and may connect again."""

    def __init__(self, system: System) -> None:
        _, _, port = system.pool.address.rpartition(":")
        self._port = int(port)
        self.open = True  # False: whoever connects is cut off at once
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.open:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
