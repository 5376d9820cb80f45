"""Membership over real ZeroMQ: who is let in, who is found dead, and who is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.gateway.worker import Leg, Lost, NewToken
from pdserve.transfer.channel import Dealer, FrameCounts
from pdserve.transfer.messages import Gone, Peers, Registered, Reserve, SamplingParams, Tokens
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
    assert [(d.id, p) for d, p in system.pool.pairs(alone=True)] == [(decode.worker, None)]
    assert system.pool.pairs(alone=False) == []
    prefill = system.prefill()
    await system.linked(1)
    assert [(d.id, p and p.id) for d, p in system.pool.pairs(alone=True)] == [(decode.worker, prefill.worker)]


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


async def test_worker_whose_kv_differs_from_a_registered_one_is_refused_naming_both(system: System) -> None:
    first = system.decode()
    await system.ready(1)
    second = system.prefill(layout=layout(dtype="float16"))
    await until(lambda: second.denied)
    assert second.denied is not None
    reason = second.denied.reason
    assert all(word in reason for word in (first.worker, second.worker, "float16", "float32")), reason


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
    loop = asyncio.get_running_loop()
    start = loop.time()
    await until(lambda: decode.worker not in system.pool.workers)
    assert 0.8 < loop.time() - start < 2.0, "the bound of these tests is one second"
    assert [event.died for event in owner.events if isinstance(event, Lost)] == [True]


async def test_killed_worker_is_found_dead_at_the_next_heartbeat_not_at_the_bound(tmp_path: Path) -> None:
    async with running_system(tmp_path, death_bound_s=60) as system:
        decode = system.decode()
        await system.ready(1)
        owner, _ = place(system, decode)
        decode.kill()
        await until(lambda: decode.worker not in system.pool.workers, timeout_s=1.0)
        assert [event.died for event in owner.events if isinstance(event, Lost)] == [True]


async def test_leaving_worker_is_forgotten_at_once_and_did_not_die(system: System) -> None:
    decode = system.decode()
    await system.ready(1)
    owner, _ = place(system, decode)
    decode.leave()
    await until(lambda: not system.pool.workers)
    assert [event.died for event in owner.events if isinstance(event, Lost)] == [False]


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
    await until(lambda: dropped["identity"] and dropped["unregistered"] and dropped["parts"] and dropped["malformed"])
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
    assert await system.pool.released(2.0)
    assert decode.live == set()


async def test_prefill_busy_pause_ends_by_itself(system: System) -> None:
    await system.pair()
    prefill = next(w for w in system.workers if isinstance(w, FakePrefill))
    system.pool.mark_busy(prefill.worker)
    known = system.pool.workers[prefill.worker]
    assert not system.pool.is_free(known)
    await until(lambda: system.pool.is_free(known), timeout_s=1.0)
