"""A prefill and a decode worker, driven from the gateway's end: exact tokens, exact bytes, nothing left behind."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.transfer.messages import Cancel, Failed, FirstTokens, Gone, Peer, Peers, Reserved
from tests.engine.tiny_models import build, prompts, reference
from tests.worker_rig import WAIT_S, Rig, prefill_message, reserve_message

PROMPTS = prompts([50, 3, 33])
LONG = prompts([200])[0]
MOST_ROUNDS = 20
_numbers = itertools.count()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def golden() -> list[list[int]]:
    model = build("llama")
    return [reference(model, prompt, 10) for prompt in PROMPTS]


def dispatch(rig: Rig, name: str, prompt: list[int], prefill: str, decode: str, **change) -> Reserved:
    """Reserve at decode, then send the prompt to prefill."""
    message = reserve_message(name, prompt, prefill, **change)
    rig.first_index[name, message.attempt] = len(message.outputs[0])
    rig.live.add((name, message.attempt))
    rig.send(decode, message)
    reserved = rig.wait_for(Reserved, name, message.attempt)
    assert isinstance(reserved, Reserved)
    rig.send(prefill, prefill_message(message, reserved, decode))
    return reserved


def settle(rig: Rig, *workers: str) -> None:
    for worker in workers:
        rig.until(lambda worker=worker: rig.held(worker) == 0, f"{worker} holds nothing")
        rig.until(lambda worker=worker: not rig.heartbeats[worker].live, f"{worker} lists nothing")


def test_tokens_through_both_workers_equal_the_reference(rig: Rig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair()
    for i, prompt in enumerate(PROMPTS[:3]):
        dispatch(rig, f"r{i}", prompt, prefill, decode)
    rig.until(lambda: all(rig.finished(f"r{i}") for i in range(3)), "all have finished")
    assert [rig.tokens(f"r{i}")[0] for i in range(3)] == golden[:3]
    first = rig.wait_for(FirstTokens, "r0")
    assert isinstance(first, FirstTokens)
    assert first.tokens == golden[0][:1]
    bytes_per_token = rig.registered[decode].layout.bytes_per_token
    assert rig.metric(decode, "pdserve_transfer_bytes_total") == sum(map(len, PROMPTS[:3])) * bytes_per_token
    settle(rig, prefill, decode)


@pytest.mark.parametrize(("prefill_link", "decode_link"), [("shm", "shm"), ("zmq", "auto"), ("auto", "zmq")])
def test_every_link_gives_the_same_tokens_and_is_counted_under_its_name(
    rig: Rig, golden: list[list[int]], prefill_link: str, decode_link: str
) -> None:
    prefill, decode = rig.pair(prefill_link=prefill_link, link=decode_link)
    link = "shm" if "zmq" not in (prefill_link, decode_link) else "zmq"
    assert [known.link for known in rig.links(prefill)] == [link]
    for i, prompt in enumerate(PROMPTS[:3]):
        dispatch(rig, f"r{i}", prompt, prefill, decode)
    rig.until(lambda: all(rig.finished(f"r{i}") for i in range(3)), "all have finished")
    assert [rig.tokens(f"r{i}")[0] for i in range(3)] == golden[:3]
    sent = sum(map(len, PROMPTS[:3])) * rig.registered[decode].layout.bytes_per_token
    assert rig.metric(decode, "pdserve_transfer_bytes_total", link=link) == sent
    settle(rig, prefill, decode)


def test_slabs_that_find_no_room_in_the_ring_follow_their_headers(rig: Rig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair(ring_bytes=4096)
    for i, prompt in enumerate(PROMPTS[:3]):
        dispatch(rig, f"r{i}", prompt, prefill, decode)
    rig.until(lambda: all(rig.finished(f"r{i}") for i in range(3)), "all have finished")
    assert [rig.tokens(f"r{i}")[0] for i in range(3)] == golden[:3]
    shares = {link: rig.metric(decode, "pdserve_transfer_bytes_total", link=link) for link in ("shm", "zmq")}
    assert min(shares.values()) > 0
    assert sum(shares.values()) == sum(map(len, PROMPTS[:3])) * rig.registered[decode].layout.bytes_per_token
    settle(rig, prefill, decode)


def test_a_pair_without_a_link_in_common_says_why(rig: Rig) -> None:
    decode = rig.start_decode(link="zmq")
    prefill = rig.start_prefill(link="shm")
    register = rig.registered[decode]
    rig.send(prefill, Peers([Peer(decode, "here", register.bulk_address, register.peer_address, register.links)]))
    rig.until(lambda: any(link.state == "refused" for link in rig.links(prefill)), "the link is refused")
    assert "does not offer" in rig.links(prefill)[0].detail


def test_only_what_decode_lacks_is_sent(rig: Rig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair()
    bytes_per_token = rig.registered[decode].layout.bytes_per_token
    dispatch(rig, "a", PROMPTS[0], prefill, decode)
    rig.until(lambda: bool(rig.finished("a")), "a has finished")
    before = rig.metric(decode, "pdserve_transfer_bytes_total")
    reserved = dispatch(rig, "b", PROMPTS[0], prefill, decode)
    rig.until(lambda: bool(rig.finished("b")), "b has finished")
    assert reserved.held_tokens == 48
    assert rig.metric(decode, "pdserve_transfer_bytes_total") - before == 2 * bytes_per_token
    assert rig.tokens("b")[0] == golden[0]


def test_a_decode_worker_alone_computes_the_prompt_itself(rig: Rig, golden: list[list[int]]) -> None:
    decode = rig.start_decode()
    for i, prompt in enumerate(PROMPTS[:3]):
        rig.live.add((f"r{i}", 1))
        rig.send(decode, reserve_message(f"r{i}", prompt))
    rig.until(lambda: all(rig.finished(f"r{i}") for i in range(3)), "all have finished")
    assert [rig.tokens(f"r{i}")[0] for i in range(3)] == golden[:3]
    assert rig.metric(decode, "pdserve_local_prefill_total") == 3
    settle(rig, decode)


@pytest.mark.parametrize("itl_slo_s", [None, 0.001, 10.0])
def test_prompts_computed_by_decode_beside_streams_that_were_handed_over_have_the_same_tokens(
    rig: Rig, golden: list[list[int]], itl_slo_s: float | None
) -> None:
    prefill, decode = rig.pair(itl_slo_s=itl_slo_s)
    for turn in range(2):
        for i, prompt in enumerate(PROMPTS):
            name = f"{turn}{i}"
            if (i + turn) % 2:
                rig.live.add((name, 1))
                rig.send(decode, reserve_message(name, prompt, cache_salt=name))
            else:
                dispatch(rig, name, prompt, prefill, decode, cache_salt=name)
    names = [f"{turn}{i}" for turn in range(2) for i in range(3)]
    rig.until(lambda: all(rig.finished(name) for name in names), "all have finished")
    assert [rig.tokens(name)[0] for name in names] == golden * 2
    assert rig.metric(decode, "pdserve_local_prefill_total") == 3
    assert rig.heartbeats[decode].speed.beside_tokens_per_s > 0
    settle(rig, prefill, decode)
    rig.until(lambda: rig.heartbeats[decode].speed.streaming_s == 0, "no stream is left")


@pytest.mark.parametrize(("preemption", "swap_bytes"), [("recompute", 0), ("swap", 1 << 20)])
def test_preemption_does_not_change_a_token(
    rig: Rig, golden: list[list[int]], preemption: str, swap_bytes: int
) -> None:
    decode = rig.start_decode(num_blocks=25, preemption=preemption, swap_bytes=swap_bytes)
    with rig.held_up(decode):
        for i, prompt in enumerate(PROMPTS):
            rig.live.add((f"r{i}", 1))
            rig.send(decode, reserve_message(f"r{i}", prompt))
        rig.until(lambda: len(rig.heartbeats[decode].live) == 3, "all are there before the first has gone")
    rig.until(lambda: all(rig.finished(f"r{i}") for i in range(3)), "all have finished")
    assert [rig.tokens(f"r{i}")[0] for i in range(3)] == golden
    assert rig.metric(decode, "pdserve_preemptions_total") > 0
    settle(rig, decode)


def num_attempts(rig: Rig, prefill: str, decode: str, golden: list[list[int]]) -> int:
    """All prompts at once, tried again as the gateway does; how many attempts that took."""
    rig.received.clear()
    ends = {f"r{next(_numbers)}": (i, 1) for i in range(3)}
    for name, (i, _) in ends.items():
        dispatch(rig, name, PROMPTS[i], prefill, decode)
    deadline = time.monotonic() + WAIT_S
    while not all(rig.finished(name, attempt) for name, (_, attempt) in ends.items()):
        assert time.monotonic() < deadline, "all have finished"
        rig.pump()
        for failed in [m for _, m in rig.received if isinstance(m, Failed)]:
            i, attempt = ends[failed.request]
            if attempt == failed.attempt:
                assert failed.reason in ("preempted", "revoked")
                ends[failed.request] = i, attempt + 1
                rig.live.discard((failed.request, attempt))
                got = [token for n in range(1, attempt + 1) for token in rig.tokens(failed.request, n).get(0, [])]
                dispatch(rig, failed.request, PROMPTS[i], prefill, decode, attempt=attempt + 1, outputs=[got])
    for name, (i, attempt) in ends.items():
        assert [t for n in range(1, attempt + 1) for t in rig.tokens(name, n).get(0, [])] == golden[i]
    return sum(attempt for _, attempt in ends.values())


def test_attempts_that_must_make_room_come_back_through_prefill_with_the_same_tokens(
    rig: Rig, golden: list[list[int]]
) -> None:
    prefill, decode = rig.pair(num_blocks=25)  # and no memory to swap to
    for _ in range(MOST_ROUNDS):  # it depends on who comes when, whether they ever need more room than there is
        if num_attempts(rig, prefill, decode, golden) > len(PROMPTS):
            break
    else:
        raise AssertionError("nobody had to make room")
    settle(rig, prefill, decode)


def test_choices_are_prefilled_and_sent_once(rig: Rig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair()
    dispatch(rig, "a", PROMPTS[0], prefill, decode, n=3)
    rig.until(lambda: rig.finished("a") == {0, 1, 2}, "all choices have finished")
    assert rig.tokens("a") == dict.fromkeys(range(3), golden[0])
    bytes_per_token = rig.registered[decode].layout.bytes_per_token
    assert rig.metric(decode, "pdserve_transfer_bytes_total") == len(PROMPTS[0]) * bytes_per_token
    settle(rig, prefill, decode)


@pytest.mark.parametrize("explicit", [True, False], ids=["cancelled", "unlisted"])
def test_an_unwanted_attempt_is_dropped_on_both_sides(rig: Rig, explicit: bool) -> None:
    prefill, decode = rig.pair()
    with rig.held_up(prefill):
        dispatch(rig, "a", LONG, prefill, decode)
        rig.until(lambda: rig.heartbeats[prefill].running == 1, "prefill is at it")
        rig.live.clear()
        if explicit:
            rig.send(decode, Cancel("a", 1))
            rig.send(prefill, Cancel("a", 1))
        settle(rig, prefill, decode)
    assert not rig.finished("a")


def test_a_cancel_at_decode_alone_stops_prefill_too(rig: Rig) -> None:
    prefill, decode = rig.pair()
    with rig.held_up(prefill):
        dispatch(rig, "a", LONG, prefill, decode)
        rig.send(decode, Cancel("a", 1))
        failed = rig.wait_for(Failed, "a")
        assert isinstance(failed, Failed)
        assert (failed.reason, failed.retryable) == ("gone", True)
        settle(rig, prefill, decode)


def test_a_reservation_does_not_wait_for_the_end_of_a_step(rig: Rig, golden: list[list[int]]) -> None:
    decode = rig.start_decode()
    with rig.held_up(decode):
        for i, prompt in enumerate(PROMPTS[:2]):
            rig.live.add((f"r{i}", 1))
            rig.send(decode, reserve_message(f"r{i}", prompt))
            rig.wait_for(Reserved, f"r{i}")
        assert not rig.tokens("r0"), "its step still runs"
    rig.until(lambda: bool(rig.finished("r0") and rig.finished("r1")), "both have finished")
    assert [rig.tokens(f"r{i}")[0] for i in range(2)] == golden[:2]
    settle(rig, decode)


def test_a_reservation_nobody_fills_ends_at_its_deadline(rig: Rig) -> None:
    prefill, decode = rig.pair(deadline_s=0.5)
    rig.live.add(("a", 1))
    rig.send(decode, reserve_message("a", PROMPTS[0], prefill))
    rig.wait_for(Reserved, "a")
    failed = rig.wait_for(Failed, "a")
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retryable) == ("transfer_deadline", True)
    settle(rig, decode)


def test_waiting_in_prefills_queue_counts_as_progress(rig: Rig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair(deadline_s=1.5, chunk_tokens=1)
    for i in range(4):
        dispatch(rig, f"r{i}", [*PROMPTS[0][i:], *range(3, 60)], prefill, decode)
    rig.until(lambda: all(rig.finished(f"r{i}") for i in range(4)), "all have finished", 60)
    assert not [m for _, m in rig.received if isinstance(m, Failed)]


def test_a_newer_attempt_replaces_the_older(rig: Rig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair(chunk_tokens=1)
    dispatch(rig, "a", PROMPTS[0], prefill, decode)
    rig.live.discard(("a", 1))
    dispatch(rig, "a", PROMPTS[0], prefill, decode, attempt=2)
    rig.until(lambda: bool(rig.finished("a", 2)), "the second attempt has finished")
    assert rig.tokens("a", 2)[0] == golden[0]
    settle(rig, prefill, decode)


def test_a_resumed_request_goes_on_from_its_tokens(rig: Rig, golden: list[list[int]]) -> None:
    decode = rig.start_decode()
    rig.live.add(("a", 2))
    rig.send(decode, reserve_message("a", PROMPTS[0], attempt=2, outputs=[golden[0][:4]]))
    rig.until(lambda: any(type(m).__name__ == "Tokens" and m.items[-1][5] for _, m in rig.received), "it has finished")
    items = [item for _, m in rig.received if type(m).__name__ == "Tokens" for item in m.items]
    assert [(item[3], item[4]) for item in items] == list(enumerate(golden[0]))[4:]


def test_prefill_fails_an_attempt_whose_decode_worker_has_left(rig: Rig) -> None:
    prefill, decode = rig.pair()
    with rig.held_up(prefill):
        dispatch(rig, "a", LONG, prefill, decode)
        rig.until(lambda: rig.heartbeats[prefill].running == 1, "prefill is at it")
        rig.send(prefill, Peers([]))
        failed = rig.wait_for(Failed, "a")
        assert isinstance(failed, Failed)
        assert (failed.reason, failed.retryable) == ("link_lost", True)
        settle(rig, prefill)


def test_a_silent_gateway_is_dropped_with_its_work_and_joined_again(rig: Rig) -> None:
    prefill, decode = rig.pair(death_bound_s=2.0)
    first = rig.identity[decode]
    rig.live.add(("a", 1))
    rig.send(decode, reserve_message("a", LONG, prefill))
    rig.wait_for(Reserved, "a")
    assert rig.held(decode) > 0
    rig.accepting = False  # no heartbeats, no registrations
    rig.until(lambda: any(k.startswith(decode) and k != first for k in rig.knocks), "decode knocks anew")
    rig.accepting = True
    rig.until(lambda: rig.identity[decode] != first, "decode registers on a new connection")
    assert rig.held(decode) == 0
    assert not rig.heartbeats[decode].live


def test_a_message_about_an_unknown_attempt_is_harmless(rig: Rig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair()
    for worker in (prefill, decode):
        rig.send(worker, Cancel("nobody", 3))
        rig.send(worker, Gone("nobody", 3))
    dispatch(rig, "a", PROMPTS[1], prefill, decode)
    rig.until(lambda: bool(rig.finished("a")), "a has finished")
    assert rig.tokens("a")[0] == golden[1]


def test_a_prompt_that_cannot_fit_fails_for_good(rig: Rig) -> None:
    decode = rig.start_decode(num_blocks=10)
    rig.live.add(("a", 1))
    rig.send(decode, reserve_message("a", PROMPTS[0]))
    failed = rig.wait_for(Failed, "a")
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retryable) == ("too_long", False)


def test_a_resumed_request_can_come_back_through_prefill(rig: Rig, golden: list[list[int]]) -> None:
    prefill, decode = rig.pair()
    dispatch(rig, "a", PROMPTS[0], prefill, decode, attempt=2, outputs=[golden[0][:4]])
    rig.until(lambda: bool(rig.finished("a", 2)), "it has finished")
    assert rig.tokens("a", 2)[0] == golden[0][4:]
    first = rig.wait_for(FirstTokens, "a")
    assert isinstance(first, FirstTokens)
    assert (first.choice, first.index, first.tokens) == (0, 4, golden[0][4:5])
    moved = rig.metric(decode, "pdserve_transfer_bytes_total")
    assert moved == (len(PROMPTS[0]) + 4) * rig.registered[decode].layout.bytes_per_token
    settle(rig, prefill, decode)
