"""One request against workers that answer, are late, fail, hang, leave and die: right tokens, and nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.request import Request, State
from pdserve.gateway.worker import Lost, NewToken
from pdserve.transfer.messages import Cancel, Failed, FirstTokens, Gone, Prefill, Reserve, Reserved, Tokens
from tests.gateway.fake_worker import FakeDecode, FakePrefill, token_at
from tests.gateway.harness import Sink, System, expected, running_system, until


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with running_system(tmp_path) as system:
        yield system
        await system.idle()


async def failure(request: Request) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await request.run()
    return caught.value


# --- the plain way ---------------------------------------------------------------------------------------------------


async def test_request_through_both_pools_gets_every_token_once_in_order(system: System) -> None:
    decode, prefill = await system.pair()
    request, sink = system.request()
    await request.run()
    assert sink.tokens == {0: expected(40, 10)}
    assert sink.finishes == {0: "length"}
    assert request.state is State.FINISHED
    reserve, asked = decode.of(Reserve)[0], prefill.of(Prefill)[0]
    assert (reserve.prefill, reserve.local_prefill, reserve.outputs) == (prefill.worker, "auto", [[]])
    assert (asked.decode, asked.reservation, asked.held_tokens) == (decode.worker, 1, 0)
    assert not decode.of(Cancel)
    assert not prefill.of(Cancel), "nobody is told to drop what has ended"


async def test_first_token_is_shown_before_decode_has_said_anything(system: System) -> None:
    _, prefill = await system.pair()
    prefill.handing_over = False
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: sink.tokens.get(0) == expected(40, 1))
    assert request.state is State.PREFILLING
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_prefill_workers_decode_is_told_to_compute_and_why(system: System) -> None:
    decode = system.decode()
    await system.ready(1)
    request, sink = system.request()
    await request.run()
    assert sink.tokens == {0: expected(40, 10)}
    reserve = decode.of(Reserve)[0]
    assert (reserve.prefill, reserve.local_prefill, reserve.local_reason) == ("", "always", "no_prefill")


async def test_decode_may_decide_to_compute_itself_and_prefill_is_left_alone(system: System) -> None:
    decode, prefill = await system.pair()
    decode.local_always = True
    request, sink = system.request()
    await request.run()
    assert sink.tokens == {0: expected(40, 10)}
    assert not prefill.of(Prefill)


async def test_n_choices_are_reserved_and_prefilled_once(system: System) -> None:
    decode, prefill = await system.pair()
    request, sink = system.request(n=3)
    await request.run()
    assert sink.tokens == {choice: expected(40, 10) for choice in range(3)}
    assert sink.finishes == dict.fromkeys(range(3), "length")
    assert (len(decode.of(Reserve)), len(prefill.of(Prefill))) == (1, 1)
    assert prefill.of(Prefill)[0].num_choices == 3


async def test_tokens_out_of_order_and_repeated_are_put_right(system: System) -> None:
    decode, _ = await system.pair()
    decode.backwards, decode.burst = True, 4
    request, sink = system.request(n=2, max_tokens=12)
    await request.run()
    assert sink.tokens == {0: expected(40, 12), 1: expected(40, 12)}


async def test_first_token_that_may_be_the_last_waits_for_decodes_word(system: System) -> None:
    _, prefill = await system.pair()
    request, sink = system.request(max_tokens=1)
    await request.run()
    assert (sink.tokens, sink.finishes) == ({0: expected(40, 1)}, {0: "length"})
    prefill.handing_over = False
    eos = frozenset({token_at(40)})
    request, sink = system.request(eos=eos)
    task = asyncio.create_task(request.run())
    await until(lambda: len(prefill.of(Prefill)) == 2)
    await asyncio.sleep(0.1)
    assert sink.tokens == {}, "whether this EOS ends the choice is decode's to say"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_eos_from_decode_finishes_the_choice(system: System) -> None:
    decode, _ = await system.pair()
    decode.eos_at = 44
    request, sink = system.request()
    await request.run()
    assert sink.tokens == {0: [*expected(40, 4), 0]}
    assert sink.finishes == {0: "stop"}


async def test_cached_tokens_are_the_larger_count_of_the_two_sides(system: System) -> None:
    decode, prefill = await system.pair()
    decode.held_tokens, prefill.cached_tokens = 16, 32
    request, _ = system.request()
    await request.run()
    assert request.cached_tokens == 32


async def test_events_of_another_attempt_are_ignored(system: System) -> None:
    decode = system.decode(stop_after=0)
    await system.ready(1)
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: decode.started)
    request.deliver(decode.worker, 7, NewToken(0, 0, 1234, ""))
    request.deliver(decode.worker, 7, Lost("long ago", died=True))
    decode.stop_after = 1000
    await task
    assert sink.tokens == {0: expected(40, 10)}
    assert system.retries == []


async def test_prefill_may_stop_listing_the_attempt_once_it_sent_the_first_token(system: System) -> None:
    decode, prefill = await system.pair()
    prefill.handing_over = False
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: sink.tokens)
    (key,) = prefill.live
    prefill.live.clear()
    await asyncio.sleep(0.7)  # time for more than two heartbeats
    decode.start(key)
    await task
    assert sink.tokens == {0: expected(40, 10)}
    assert system.retries == []


# --- ends of the gateway's own making --------------------------------------------------------------------------------


async def test_stop_string_cancels_its_choice_only_and_the_others_go_on(system: System) -> None:
    decode, _ = await system.pair()
    decode.token_interval_s = 0.03
    request, sink = system.request(n=2, sink=Sink(stop_at={0: 3}))
    await request.run()
    assert sink.tokens == {0: expected(40, 3), 1: expected(40, 10)}
    assert Cancel(request.id, 1, 0) in decode.of(Cancel)


async def test_stop_string_in_the_last_choice_cancels_the_whole_attempt(system: System) -> None:
    decode, _ = await system.pair()
    decode.token_interval_s = 0.02
    request, _ = system.request(max_tokens=100, sink=Sink(stop_at={0: 3}))
    await request.run()
    await until(lambda: Cancel(request.id, 1) in decode.of(Cancel))


async def test_stop_string_in_the_first_token_cancels_both_legs(system: System) -> None:
    decode, prefill = await system.pair()
    prefill.handing_over = False
    request, sink = system.request(sink=Sink(stop_at={0: 1}))
    await request.run()
    assert sink.tokens == {0: expected(40, 1)}
    await until(lambda: decode.of(Cancel) and prefill.of(Cancel))


async def _cancelled_while(system: System, request: Request, reached: Callable[[], object]) -> None:
    task = asyncio.create_task(request.run())
    await until(reached)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert request.state is State.CANCELLED
    assert system.num_legs == 0
    await system.idle()


async def test_cancel_leaves_nothing_behind_in_any_state(system: System) -> None:
    decode, prefill = await system.pair()
    decode.answering = False
    request, _ = system.request()
    await _cancelled_while(system, request, lambda: decode.live)
    decode.answering, prefill.answering = True, False
    request, _ = system.request()
    await _cancelled_while(system, request, lambda: prefill.live)
    assert request.state is State.CANCELLED
    prefill.answering, prefill.handing_over = True, False
    request, sink = system.request()
    await _cancelled_while(system, request, lambda: sink.tokens)
    prefill.handing_over, decode.stop_after = True, 4
    request, sink = system.request()
    await _cancelled_while(system, request, lambda: len(sink.tokens.get(0, ())) == 4)
    decode.stop_after = 1000
    request, sink = system.request()
    await request.run()
    assert sink.tokens == {0: expected(40, 10)}, "the next request is normal"


async def test_cancel_in_the_queue_leaves_nothing_behind(system: System) -> None:
    decode = system.decode(max_sequences=1, stop_after=1)
    await system.ready(1)
    running = [asyncio.create_task(system.request()[0].run()) for _ in range(2)]
    await until(lambda: system.num_legs == 2)
    request, _ = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: len(system.dispatcher.queue) == 1)
    assert request.state is State.QUEUED
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(system.dispatcher.queue) == 0
    assert len(decode.of(Reserve)) == 2
    for other in running:
        other.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_fault_in_the_sink_comes_out_and_releases_everything(system: System) -> None:
    await system.pair()

    class Broken(Sink):
        def token(self, choice: int, token: int, finish: str, logprobs: object = None) -> bool:
            raise ZeroDivisionError

    request, _ = system.request(sink=Broken())
    with pytest.raises(ZeroDivisionError):
        await request.run()
    assert request.state is State.FAILED
    assert system.num_legs == 0


# --- workers that fail -----------------------------------------------------------------------------------------------


async def test_busy_prefill_is_tried_again_and_costs_no_retry(system: System) -> None:
    decode, prefill = await system.pair()
    prefill.busy_times = 5
    request, sink = system.request()
    await request.run()
    assert sink.tokens == {0: expected(40, 10)}
    assert system.retries == ["busy"] * 5
    assert [m.attempt for m in decode.of(Reserve)] == [1, 2, 3, 4, 5, 6]
    assert [m.attempt for m in decode.of(Cancel)] == [1, 2, 3, 4, 5], "each reservation was given back"


async def test_busy_prefill_is_left_for_another_one(system: System) -> None:
    system.decode()
    first, second = system.prefill("p0"), system.prefill("p1")
    await system.linked(2)
    first.busy_times = second.busy_times = 1
    request, _ = system.request()
    await request.run()
    asked = [len(first.of(Prefill)), len(second.of(Prefill))]
    assert sum(asked) == 3
    assert min(asked) == 1


async def test_prefill_killed_before_the_first_token_is_replaced_unseen(system: System) -> None:
    decode = system.decode()
    dying, other = system.prefill("p0", answering=False), system.prefill("p1", answering=False)
    await system.linked(2)
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: dying.live or other.live)
    if other.live:
        dying, other = other, dying
    other.answering = True
    dying.kill()
    await task
    assert sink.tokens == {0: expected(40, 10)}
    assert system.retries == ["prefill_lost"]
    assert decode.of(Cancel)[0].attempt == 1
    assert decode.of(Reserve)[1].outputs == [[]]


async def test_last_prefill_killed_means_that_decode_computes(system: System) -> None:
    decode, prefill = await system.pair()
    prefill.answering = False
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: prefill.live)
    prefill.kill()
    await task
    assert sink.tokens == {0: expected(40, 10)}
    assert decode.of(Reserve)[1].local_prefill == "always"


async def test_prefill_killed_before_the_handoff_continues_behind_its_first_token(system: System) -> None:
    decode, prefill = await system.pair()
    prefill.handing_over = False
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: sink.tokens)
    prefill.kill()
    await task
    assert sink.tokens == {0: expected(40, 10)}
    resumed = decode.of(Reserve)[1]
    assert (resumed.outputs, resumed.local_prefill, resumed.local_reason) == ([expected(40, 1)], "always", "no_prefill")


@pytest.mark.parametrize("n", [1, 3])
async def test_decode_killed_mid_stream_loses_and_repeats_no_token(system: System, n: int) -> None:
    dying, other = system.decode("d0", stop_after=4), system.decode("d1", stop_after=4)
    prefill = system.prefill()
    await system.linked(2)
    request, sink = system.request(n=n)
    task = asyncio.create_task(request.run())
    await until(lambda: all(len(sink.tokens.get(i, ())) == 4 for i in range(n)))
    if other.live:
        dying, other = other, dying
    other.stop_after = 1000
    dying.kill()
    await task
    assert sink.tokens == {choice: expected(40, 10) for choice in range(n)}
    assert system.retries == ["decode_lost"]
    resumed = other.of(Reserve)[0]
    assert (resumed.attempt, resumed.outputs, resumed.params) == (2, [expected(40, 4)] * n, request.job.params)
    assert len(prefill.of(Prefill)) == (2 if n == 1 else 1)  # several choices are recomputed by decode


async def test_decode_killed_after_some_choices_ended_resumes_the_others_only(system: System) -> None:
    first = system.decode("d0", stop_after=4)
    system.prefill()
    await system.linked(1)
    request, sink = system.request(n=2, sink=Sink(stop_at={1: 2}))
    task = asyncio.create_task(request.run())
    await until(lambda: len(sink.tokens.get(0, ())) == 4)
    second = system.decode("d1")
    await until(lambda: second.registered)
    first.kill()
    await task
    assert sink.tokens == {0: expected(40, 10), 1: expected(40, 2)}
    assert second.of(Reserve)[0].finished == [False, True]


async def test_frozen_decode_is_left_within_the_death_bound_and_its_late_tokens_do_not_count(system: System) -> None:
    frozen, other = system.decode("d0", stop_after=3), system.decode("d1", stop_after=3)
    await system.ready(2)
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: len(sink.tokens.get(0, ())) == 3)
    if other.live:
        frozen, other = other, frozen
    frozen.frozen, other.stop_after = True, 1000
    await asyncio.wait_for(task, 20.0)  # less than the time limit of the queue
    frozen.stop_after, frozen.frozen = 1000, False
    await asyncio.sleep(0.2)
    assert sink.tokens == {0: expected(40, 10)}
    await until(lambda: frozen.denied)
    frozen.live.clear()


async def test_request_waits_for_a_worker_to_come_back_when_the_only_one_died(system: System) -> None:
    dying = system.decode("d0", stop_after=4)
    await system.ready(1)
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: len(sink.tokens.get(0, ())) == 4)
    dying.kill()
    await until(lambda: request.state is State.QUEUED)
    system.decode("d0")
    await task
    assert sink.tokens == {0: expected(40, 10)}


async def test_leaving_worker_hands_its_requests_on(system: System) -> None:
    leaving, other = system.decode("d0", stop_after=2), system.decode("d1", stop_after=2)
    await system.ready(2)
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: len(sink.tokens.get(0, ())) == 2)
    if other.live:
        leaving, other = other, leaving
    other.stop_after = 1000
    leaving.leave()
    leaving.live.clear()
    await task
    assert sink.tokens == {0: expected(40, 10)}


async def test_attempt_that_a_worker_forgot_is_tried_again(system: System) -> None:
    decode = system.decode(stop_after=3)
    await system.ready(1)
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: len(sink.tokens.get(0, ())) == 3)
    decode.stop_after = 1000
    decode.started.clear()
    decode.live.clear()
    await task
    assert sink.tokens == {0: expected(40, 10)}
    assert system.retries == ["decode_lost"]


async def test_request_that_saw_two_workers_die_is_not_given_to_a_third(system: System) -> None:
    decodes = [system.decode(f"d{i}", stop_after=2 + i) for i in range(3)]
    await system.ready(3)
    request, _ = system.request()
    task = asyncio.create_task(failure(request))
    for _ in range(2):
        await until(lambda: any(d.live for d in decodes if not d.killed))
        await asyncio.sleep(0.05)
        next(d for d in decodes if d.live and not d.killed).kill()
    error = await task
    assert (error.status, error.code) == (500, "poison")
    assert sum(len(d.of(Reserve)) for d in decodes) == 2


async def test_retries_are_bounded_and_the_last_cause_is_named(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    request, _ = system.request()
    task = asyncio.create_task(failure(request))
    for attempt in range(1, 5):
        await until(lambda attempt=attempt: (request.id, attempt) in decode.live)
        decode.live.clear()
        decode.dealer.send(Failed(request.id, attempt, "bad_sum", f"slab {attempt}", True))
    error = await task
    assert (error.status, error.code) == (500, "worker_failed")
    assert "bad_sum: slab 4" in error.message
    assert system.retries == ["failed"] * 3


async def test_pair_whose_link_is_not_there_after_all_is_not_tried_again_at_once(system: System) -> None:
    decode, prefill = await system.pair()
    prefill.no_link_times = 10
    request, sink = system.request()
    await request.run()
    assert sink.tokens == {0: expected(40, 10)}
    assert system.retries == ["busy"]
    assert [reserve.prefill for reserve in decode.of(Reserve)] == [prefill.worker, ""], "decode computes it alone"
    await system.linked(1)  # the next heartbeat decides anew


async def test_revoked_reservations_do_not_use_up_the_retries(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    for attempt in range(1, 8):
        await until(lambda attempt=attempt: (request.id, attempt) in decode.live)
        decode.live.clear()
        decode.answering = attempt == 7
        decode.dealer.send(Failed(request.id, attempt, "revoked", "", True))
    await task
    assert sink.tokens == {0: expected(40, 10)}


async def test_failure_that_is_not_retryable_is_final(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    for reason, status in (("nan_logits", 500), ("too_long", 400)):
        request, _ = system.request()
        task = asyncio.create_task(failure(request))
        await until(lambda: decode.live)
        decode.live.clear()
        decode.dealer.send(Failed(request.id, 1, reason, "why", False))
        error = await task
        assert error.status == status
        assert "why" in error.message


async def test_messages_that_make_no_sense_end_the_attempt_not_the_gateway(system: System) -> None:
    decode = system.decode(answering=False)
    await system.ready(1)
    request, _ = system.request()
    task = asyncio.create_task(failure(request))
    nonsense = [
        lambda n: Tokens([(request.id, n, 99, 0, 7, "")]),
        lambda n: FirstTokens(request.id, n, 0, 0, [1], 0, 0.0, 0.0),
        lambda n: Gone(request.id, n),
        lambda n: Reserved(request.id, n, 1, 0, False, "", 1.0),  # waits for a prefill worker it was not given
    ]
    for attempt, make in enumerate(nonsense, 1):
        await until(lambda attempt=attempt: (request.id, attempt) in decode.live)
        decode.live.clear()
        decode.dealer.send(make(attempt))
    error = await task
    assert error.status == 500


# --- queue and limits ------------------------------------------------------------------------------------------------


async def test_no_worker_is_503_at_once(system: System) -> None:
    request, _ = system.request()
    error = await asyncio.wait_for(failure(request), 20.0)  # less than the time limit of the queue
    assert error.code == "no_worker"
    assert (error.status, error.headers) == (503, {"Retry-After": "1"})


async def test_without_local_prefill_a_linked_pair_is_needed(tmp_path: Path) -> None:
    async with running_system(tmp_path, local_prefill="never") as system:
        decode = system.decode()
        await system.ready(1)
        assert not system.dispatcher.can_serve
        assert (await failure(system.request()[0])).status == 503
        system.prefill()
        await system.linked(1)
        request, _ = system.request()
        await request.run()
        assert decode.of(Reserve)[0].local_prefill == "never"


async def test_reservation_that_does_not_come_in_time_is_503_and_given_back(tmp_path: Path) -> None:
    async with running_system(tmp_path, queue_timeout_s=0.3) as system:
        decode = system.decode(answering=False)
        await system.ready(1)
        error = await failure(system.request()[0])
        assert (error.status, error.code, error.headers["Retry-After"]) == (503, "queue_timeout", "1")
        await until(lambda: decode.of(Cancel))
        await system.idle()


async def test_queue_is_bounded_and_waiting_in_it_has_a_limit(tmp_path: Path) -> None:
    async with running_system(tmp_path, max_queue=1, queue_timeout_s=1.5) as system:
        system.decode(max_sequences=1, stop_after=1)
        await system.ready(1)
        running = [asyncio.create_task(system.request()[0].run()) for _ in range(2)]
        await until(lambda: system.num_legs == 2)
        waiting = asyncio.create_task(failure(system.request()[0]))
        await until(lambda: len(system.dispatcher.queue) == 1)
        assert (await failure(system.request()[0])).status == 429
        assert (await waiting).status == 503
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_many_requests_over_few_places_all_finish(system: System) -> None:
    decodes = [system.decode(f"d{i}", max_sequences=2) for i in range(2)]
    for i in range(2):
        system.prefill(f"p{i}")
    await system.linked(4)
    requests = [system.request(prompt_tokens=20 + i, n=1 + i % 3) for i in range(40)]
    await asyncio.gather(*(request.run() for request, _ in requests))
    for i, (_, sink) in enumerate(requests):
        assert sink.tokens == {choice: expected(20 + i, 10) for choice in range(1 + i % 3)}
    assert all(decode.of(Reserve) for decode in decodes)


async def test_prompt_that_no_prefill_pool_can_hold_goes_to_decode_alone(system: System) -> None:
    decode = system.decode(num_blocks=64)
    prefill: FakePrefill = system.prefill(num_blocks=2)
    await system.linked(1)
    request, sink = system.request(prompt_tokens=100)
    await request.run()
    assert sink.tokens == {0: expected(100, 10)}
    assert not prefill.of(Prefill)
    assert isinstance(decode, FakeDecode)


async def test_conversation_returns_to_the_decode_worker_that_held_it(system: System) -> None:
    decodes = [system.decode(f"d{i}") for i in range(3)]
    await system.ready(3)
    counts = []
    for _ in range(6):
        request, _ = system.request(prompt_tokens=200)
        await request.run()
        counts = sorted(len(d.of(Reserve)) for d in decodes)
    assert counts == [0, 0, 6]


async def test_a_preempted_request_has_the_whole_queue_time_again(system: System) -> None:
    decode = system.decode(stop_after=3)
    await system.ready(1)
    request, sink = system.request()
    task = asyncio.create_task(request.run())
    await until(lambda: len(sink.tokens.get(0, ())) == 3)
    request._deadline = system.dispatcher.clock() - 1.0
    decode.live.clear()
    decode.started.clear()
    decode.stop_after = 1000
    decode.dealer.send(Failed(request.id, 1, "preempted", "its blocks were needed", True))
    await task
    assert sink.tokens == {0: expected(40, 10)}
    assert system.retries == ["preempted"]
