"""Workers that drain, driven from the gateway's end: they take nothing new, lose nothing begun, and then leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.transfer.messages import Cancel, Drain, Failed, FirstTokens, Leaving, Message, Reserved
from tests.engine.tiny_models import build, prompts, reference
from tests.test_worker_pair import dispatch
from tests.worker_rig import Rig, prefill_message, reserve_message

PROMPT = prompts([50])[0]
LONG = prompts([200])[0]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def golden() -> list[int]:
    return reference(build("llama"), PROMPT, 60)


def begin(rig: Rig, worker: str) -> None:
    """As its SIGTERM handler does."""
    name = worker.partition("#")[0]
    number = int(name.rpartition("-")[2])
    rig.workers[number][0].drain()
    rig.until(lambda: rig.heartbeats[worker].draining, "it says that it drains")


def left(rig: Rig, worker: str) -> bool:
    """Has it said goodbye, and ended? Its thread may end from here on."""
    return any(isinstance(message, Leaving) and sender == worker for sender, message in rig.received)


def until_left(rig: Rig, worker: str) -> None:
    """Long before the 30 s are over that it may drain."""
    number = int(worker.partition("#")[0].rpartition("-")[2])
    entry = rig.workers[number]
    rig.workers.remove(entry)  # the rig takes the end of a worker for a fault
    rig.until(lambda: left(rig, worker), f"{worker} leaves", 20.0)
    entry[1].join(5)
    assert not entry[1].is_alive()


def failures(rig: Rig) -> list[tuple[str, str, bool]]:
    return [(m.request, m.reason, m.retryable) for _, m in rig.received if isinstance(m, Failed)]


def test_a_draining_decode_worker_finishes_its_streams_and_refuses_new_ones(rig: Rig, golden: list[int]) -> None:
    decode = rig.start_decode()
    rig.live.add(("a", 1))
    rig.send(decode, reserve_message("a", PROMPT, max_tokens=60))
    rig.until(lambda: len(rig.tokens("a").get(0, [])) > 3, "a is running")
    begin(rig, decode)
    rig.live.add(("b", 1))
    rig.send(decode, reserve_message("b", PROMPT, max_tokens=60))
    rig.wait_for(Failed, "b")
    rig.live.discard(("b", 1))
    rig.send(decode, Drain())
    rig.until(lambda: bool(rig.finished("a")), "a has finished")
    assert rig.tokens("a")[0] == golden
    assert failures(rig) == [("b", "draining", True)]
    assert not left(rig, decode)
    rig.live.clear()
    until_left(rig, decode)


def test_a_draining_prefill_worker_finishes_its_prompts_and_refuses_new_ones(rig: Rig, golden: list[int]) -> None:
    prefill, decode = rig.pair(chunk_tokens=1)
    with rig.held_up(prefill):
        dispatch(rig, "a", PROMPT, prefill, decode, max_tokens=60)
        rig.until(lambda: ("a", 1) in rig.heartbeats[prefill].live, "prefill is at it")
        begin(rig, prefill)
    dispatch(rig, "b", LONG, prefill, decode)
    rig.wait_for(Failed, "b")
    rig.live.discard(("b", 1))
    rig.send(decode, Cancel("b", 1))
    rig.send(prefill, Drain())
    rig.until(lambda: bool(rig.finished("a")), "a has finished")
    assert rig.tokens("a")[0] == golden
    rig.wait_for(FirstTokens, "a")
    assert failures(rig) == [("b", "draining", True)]
    rig.live.clear()
    until_left(rig, prefill)


def test_the_word_of_a_gateway_makes_a_worker_drain_and_leave(rig: Rig) -> None:
    decode = rig.start_decode()
    rig.until(lambda: decode in rig.heartbeats, "it beats")
    rig.send(decode, Drain())
    until_left(rig, decode)


def test_a_worker_leaves_only_when_its_gateway_wants_nothing_of_it_any_more(rig: Rig) -> None:
    prefill, decode = rig.pair()
    dispatch(rig, "a", PROMPT, prefill, decode, max_tokens=5)
    rig.until(lambda: bool(rig.finished("a")), "a has finished")
    begin(rig, prefill)
    rig.send(prefill, Drain())
    rig.until(lambda: rig.held(prefill) == 0, "it holds nothing")
    for _ in range(100):
        rig.pump()
        assert not left(rig, prefill), "the gateway still lists a"
    rig.live.clear()
    until_left(rig, prefill)


def test_a_gateway_that_never_answers_is_not_waited_for_by_a_worker_that_holds_nothing(rig: Rig) -> None:
    decode = rig.start_decode()
    rig.until(lambda: decode in rig.heartbeats, "it beats")
    begin(rig, decode)
    until_left(rig, decode)


def test_a_reservation_that_prefill_fills_is_finished_by_a_draining_decode_worker(
    rig: Rig, golden: list[int]
) -> None:
    prefill, decode = rig.pair(chunk_tokens=1)
    message: Message = reserve_message("a", PROMPT, prefill, max_tokens=60)
    rig.live.add(("a", 1))
    rig.send(decode, message)
    reserved = rig.wait_for(Reserved, "a")
    begin(rig, decode)
    rig.send(prefill, prefill_message(message, reserved, decode))
    rig.until(lambda: bool(rig.finished("a")), "a has finished")
    assert rig.tokens("a")[0] == golden
