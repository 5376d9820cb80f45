"""Who could serve a request now or in a moment, and requests that wait for somebody who is not quite ready."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.serving import LINKING_S, is_starting, pairs
from pdserve.gateway.worker import Worker
from pdserve.transfer.messages import Register, Reserve, WorkerHeartbeat
from pdserve.transfer.reports import Link
from tests.gateway.fake_worker import layout
from tests.gateway.harness import Sink, System, expected, running_system, until


def worker(role: str, *links: Link, ready: bool = True, draining: bool = False, registered_at: float = 0.0) -> Worker:
    """One of the model, called after its role."""
    name, links_of = f"{role}#00000001", ["zmq"]
    register = Register(name, role, "m", layout(), "h", "ipc:///b", "ipc:///c", links_of, 16, 64, 1000, 8, 1)
    made = Worker("", register, last_heard=registered_at, registered_at=registered_at)
    if ready or links:
        made.heartbeat = WorkerHeartbeat(0, [], ready, 64, 0, 0, 0, 0, draining, [*links], [])
    made.dismissed = draining
    return made


def link(state: str) -> Link:
    return Link("decode#00000001", "zmq" if state == "linked" else "", state, "", 0)


@pytest.mark.parametrize(
    ("workers", "split", "alone"),
    [
        ([], False, False),
        ([worker("decode", ready=False)], False, True),
        ([worker("decode", ready=False, draining=True)], False, False),
        ([worker("prefill", ready=False)], False, False),
        ([worker("decode"), worker("prefill", ready=False)], True, True),
        ([worker("decode", ready=False), worker("prefill")], True, True),
        ([worker("decode", draining=True), worker("prefill", ready=False)], False, False),
        ([worker("decode", ready=False), worker("prefill", draining=True)], False, True),
        ([worker("decode"), worker("prefill")], True, True),  # it has not even heard of its peer
        ([worker("decode"), worker("prefill", link("connecting"))], True, True),
        ([worker("decode"), worker("prefill", link("refused"))], False, False),
        ([worker("decode"), worker("prefill", link("refused"), ready=False)], False, False),
    ],
)  # fmt: skip
def test_somebody_is_starting_where_those_who_are_here_may_yet_become_a_pair(
    workers: list[Worker], split: bool, alone: bool
) -> None:
    assert not pairs(workers, alone=False)
    assert is_starting(workers, alone=False, now=1.0) == split
    if not pairs(workers, alone=True):
        assert is_starting(workers, alone=True, now=1.0) == alone


def test_a_link_that_is_not_made_in_time_is_not_waited_for_any_longer() -> None:
    late = worker("decode", registered_at=100.0)
    both = [late, worker("prefill", link("connecting"))]
    assert is_starting(both, alone=False, now=100.0 + LINKING_S / 2)
    assert not is_starting(both, alone=False, now=100.0 + 2 * LINKING_S)
    late.heartbeat = None
    assert is_starting(both, alone=False, now=100.0 + 2 * LINKING_S), "who is not ready has not begun to link"


async def failure(system: System) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(system.request()[0].run(), 20.0)  # less than the time limit of the queue
    return caught.value


async def waits(system: System) -> tuple[asyncio.Task[None], Sink]:
    """A request that has found no place, but is not refused."""
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: len(system.dispatcher.queue) == 1)
    await system.settled()
    assert not task.done()
    return task, sink


@pytest.mark.parametrize("local_prefill", ["auto", "never"])
async def test_a_request_waits_for_the_only_decode_worker_that_does_not_drain_to_be_ready(
    tmp_path: Path, local_prefill: str
) -> None:
    async with running_system(tmp_path, local_prefill=local_prefill, death_bound_s=60.0) as system:
        leaving, _ = await system.pair()
        starting = system.decode("d1", beating=False)
        await until(lambda: starting.registered)
        leaving.draining = True
        await until(lambda: not system.dispatcher.can_serve)
        task, sink = await waits(system)
        starting.beating = True
        await task
        assert sink.tokens == {0: expected(40, 10)}
        assert (len(leaving.of(Reserve)), len(starting.of(Reserve))) == (0, 1)


async def test_where_a_pair_is_needed_a_request_waits_for_prefill_to_be_ready_and_linked(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never", death_bound_s=60.0) as system:
        decode = system.decode()
        await system.ready(1)
        prefill = system.prefill(beating=False, link_state="connecting")
        await until(lambda: prefill.registered)
        task, sink = await waits(system)
        prefill.beating = True
        await system.ready(2)
        await system.settled()
        assert not task.done(), "it is ready, but not linked"
        prefill.decode_links = [Link(decode.worker, "zmq", "linked", "", 0)]
        await task
        assert sink.tokens == {0: expected(40, 10)}


async def test_a_pair_that_was_refused_is_not_waited_for(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never", death_bound_s=60.0) as system:
        system.decode()
        prefill = system.prefill(link_state="refused")
        await system.ready(2)
        await until(lambda: prefill.decode_links)
        error = await failure(system)
        assert (error.status, error.code) == (503, "no_worker")


async def test_who_waits_for_a_worker_that_ends_before_it_is_ready_is_told_so(tmp_path: Path) -> None:
    async with running_system(tmp_path, death_bound_s=60.0) as system:
        starting = system.decode(beating=False)
        await until(lambda: starting.registered)
        task, _ = await waits(system)
        starting.kill()
        with pytest.raises(ApiError) as told:
            await asyncio.wait_for(task, 20.0)  # less than the time limit of the queue
        assert (told.value.status, told.value.code) == (503, "no_worker")


async def test_waiting_for_a_worker_to_be_ready_has_the_time_limit_of_the_queue(tmp_path: Path) -> None:
    async with running_system(tmp_path, queue_timeout_s=0.5, death_bound_s=60.0) as system:
        starting = system.decode(beating=False)
        await until(lambda: starting.registered)
        error = await failure(system)
        assert (error.status, error.code) == (503, "queue_timeout")
        assert len(system.dispatcher.queue) == 0
