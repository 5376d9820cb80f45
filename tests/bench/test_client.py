"""Client and load against a server with scripted answers: counts and relations, never speeds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from aiohttp import web

from pdserve.bench.client import Client, ServedModel, find_model, open_session
from pdserve.bench.errors import BenchError
from pdserve.bench.load import Run
from pdserve.bench.prompts import PromptMaker, id_pieces
from pdserve.bench.record import INTERRUPTED, NOT_SENT, RequestRecord
from pdserve.bench.stats import summarize
from pdserve.bench.workload import PlannedRequest, arrival_times, synthetic

MAKER = PromptMaker(id_pieces(100, 999), seed=0)
TIMER_SLACK_S = 0.002  # an event loop may wake a little early by another clock's reckoning


def requests(num: int, rate_per_s: float | None = None, output_tokens: int = 4) -> Any:
    times = None if rate_per_s is None else arrival_times(rate_per_s, "uniform", 0)
    plan = synthetic(MAKER, "run", input_tokens=8, output_tokens=output_tokens, prefix_tokens=0, times=times)
    return islice(plan, num)


async def send_one(url: str, output_tokens: int = 4, timeout_s: float = 10) -> RequestRecord:
    async with open_session(timeout_s) as session:
        run = Run(Client(session, url, "tiny"))
        await run.closed_loop(requests(1, output_tokens=output_tokens), concurrency=1)
    return run.records[0]


async def test_a_request_asks_for_exact_greedy_streamed_tokens_with_ids(server: Any) -> None:
    await send_one(server.url)
    body = server.bodies[0]
    assert len(body["prompt"]) == 8
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (4, 0, True)
    assert (body["stream"], body["return_token_ids"], body["stream_options"]) == (True, True, {"include_usage": True})


async def test_latencies_are_no_shorter_than_the_server_took_and_add_up(server: Any, script: Any) -> None:
    server.behaviours = [script.complete(first_after_s=0.06, gap_s=0.03)]
    record = await send_one(server.url, output_tokens=5)
    assert record.ok
    assert record.output_tokens == record.num_chunks == len(record.token_times_s) == 5
    assert record.reported_input_tokens == 8
    assert record.cached_tokens == 0
    assert record.ttft_s is not None
    assert record.tpot_s is not None
    assert record.ttft_s >= 0.06 - TIMER_SLACK_S
    assert len(record.itl_s) == 4
    assert sum(record.itl_s) == pytest.approx(record.tpot_s * 4)
    assert sum(record.itl_s) >= 4 * (0.03 - TIMER_SLACK_S)
    assert record.ttft_s + sum(record.itl_s) <= record.e2e_s


async def test_several_tokens_in_a_chunk_are_all_counted(server: Any, script: Any) -> None:
    parts = [
        script.chunk([1]),
        script.chunk([], text=""),
        0.05,
        script.chunk([2, 3, 4]),
        0.05,
        script.chunk([5], "length"),
        b"data: [DONE]\n\n",
    ]
    server.behaviours = [lambda request, body: script.stream(request, parts)]
    record = await send_one(server.url, output_tokens=5)
    assert record.ok
    assert (record.output_tokens, record.num_chunks) == (5, 3)
    assert record.itl_s[1] == record.itl_s[2] == 0
    assert all(gap >= 0.05 - TIMER_SLACK_S for gap in (record.itl_s[0], record.itl_s[3]))


async def test_a_response_is_read_to_its_end_so_that_no_server_sees_a_disconnect(server: Any, script: Any) -> None:
    finished = []

    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        response: web.StreamResponse = await script.complete()(request, body)
        await asyncio.sleep(0.1)  # [DONE] has arrived by now
        assert request.transport is not None
        finished.append(not request.transport.is_closing())
        return response

    server.behaviours = [behave]
    record = await send_one(server.url)
    assert record.ok
    assert finished == [True]
    assert record.e2e_s >= 0.1 - TIMER_SLACK_S


async def test_without_token_ids_chunks_and_usage_are_counted(server: Any, script: Any) -> None:
    parts = [script.chunk(None), script.chunk(None), script.chunk(None, "length", text=""), script.usage(8, 6, 3)]
    server.behaviours = [lambda request, body: script.stream(request, [*parts, b"data: [DONE]\n\n"])]
    record = await send_one(server.url, output_tokens=6)
    assert record.ok
    assert len(record.token_times_s) == 2
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (6, 8, 3)


def refusal(status: int) -> Callable[[web.Request, Any], Any]:
    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        return web.json_response({"error": {"message": "the queue is full"}}, status=status)

    return behave


def breaking_off(script: Any) -> Callable[[web.Request, Any], Any]:
    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        response = await script.stream(request, [script.chunk([1])])
        assert request.transport is not None
        request.transport.abort()
        return response

    return behave


def sent(script: Any, *parts: Any) -> Callable[[web.Request, Any], Any]:
    return lambda request, body: script.stream(request, parts)


async def test_every_way_to_fail_is_a_kind_and_ends_no_run(server: Any, script: Any) -> None:
    first, last, done = script.chunk([1]), script.chunk([2], "length"), b"data: [DONE]\n\n"
    failures = {
        "http_429": refusal(429),
        "http_500": refusal(500),
        "truncated": sent(script, first),
        "truncated ": sent(script, first, done),
        "stream_error": sent(script, first, b'data: {"error": {"message": "the worker died"}}\n\n'),
        "stream_error ": sent(script, b'data: {"error": "odd"}\n\n'),
        "disconnected": breaking_off(script),
        "bad_stream": sent(script, b"data: {not json\n\n", last, done),
        "bad_stream ": sent(script, b"data: 7\n\n"),
        "bad_stream  ": sent(script, b'data: {"id": 1}\n\n'),
        "bad_stream   ": sent(script, b'data: {"choices": [1]}\n\n'),
        "bad_stream    ": sent(script, b"data: \xff\n\n"),
        "bad_stream     ": sent(script, b"data: " + b"[" * 200_000 + b"\n\n"),
        "timeout": sent(script, first, 5.0, last, done),
    }
    server.behaviours = [*failures.values(), script.complete()]
    async with open_session(timeout_s=2.0) as session:
        run = Run(Client(session, server.url, "tiny"))
        await run.closed_loop(requests(len(failures) + 2), concurrency=1)
    assert [record.error for record in run.records] == [*(kind.strip() for kind in failures), "", ""]
    summary = summarize(run.records, None, None)
    assert (summary.num_ok, summary.num_failed) == (2, len(failures))
    assert summary.errors["bad_stream"] == 6
    assert summary.error_examples["http_429"] == "the queue is full"
    assert summary.error_examples["stream_error"] == "the worker died"


async def test_a_server_that_is_gone_is_a_connect_error(unused_port: int) -> None:
    record = await send_one(f"http://127.0.0.1:{unused_port}")
    assert record.error == "connect"
    assert record.output_tokens == 0


async def test_a_closed_loop_never_has_more_outstanding_than_clients(server: Any, script: Any) -> None:
    live, most = 0, 0

    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        nonlocal live, most
        live += 1
        most = max(most, live)
        response: web.StreamResponse = await script.complete(first_after_s=0.01)(request, body)
        live -= 1
        return response

    server.behaviours = [behave]
    async with open_session(10) as session:
        run = Run(Client(session, server.url, "tiny"))
        await run.closed_loop(requests(20), concurrency=3)
    assert most <= 3
    assert sorted(record.index for record in run.records) == list(range(20))
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 20
    assert run.num_outstanding == 0


async def test_an_open_loop_sends_at_its_times_though_nothing_is_answered(server: Any, script: Any) -> None:
    release = asyncio.Event()
    seen = asyncio.Event()

    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        if len(server.bodies) == 10:
            seen.set()
        await release.wait()
        response: web.StreamResponse = await script.complete()(request, body)
        return response

    server.behaviours = [behave]
    async with open_session(30) as session:
        run = Run(Client(session, server.url, "tiny"))
        load = asyncio.create_task(run.open_loop(requests(10, rate_per_s=100), max_outstanding=100))
        await asyncio.wait_for(seen.wait(), 20)
        assert run.records == []
        release.set()
        await load
    assert all(record.ok for record in run.records)
    for record in run.records:
        assert record.scheduled_s == pytest.approx(run.started_s + record.index / 100)
        assert record.sent_s >= record.due_s - TIMER_SLACK_S
    summary = summarize(run.records, None, None)
    assert summary.scheduled_ttft_ms is not None
    assert summary.ttft_ms is not None
    assert summary.scheduled_ttft_ms.mean >= summary.ttft_ms.mean - 1


async def test_past_the_bound_an_open_loop_counts_instead_of_waiting(server: Any, script: Any) -> None:
    release = asyncio.Event()

    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        await release.wait()
        response: web.StreamResponse = await script.complete()(request, body)
        return response

    def on_change(run: Run) -> None:
        if len(run.records) == 6:  # all that will be refused: let the others go on
            release.set()

    server.behaviours = [behave]
    async with open_session(30) as session:
        run = Run(Client(session, server.url, "tiny"), on_change)
        await run.open_loop(requests(10, rate_per_s=200), max_outstanding=4)
    assert sorted(record.index for record in run.records if record.ok) == [0, 1, 2, 3]
    assert [record.error for record in run.records if not record.ok] == [NOT_SENT] * 6
    assert len(server.bodies) == 4


async def test_a_duration_ends_both_loops_and_what_was_sent_is_finished(server: Any, script: Any) -> None:
    server.behaviours = [script.complete(first_after_s=0.02)]
    async with open_session(10) as session:
        closed, opened = (Run(Client(session, server.url, "tiny")) for _ in range(2))
        await closed.closed_loop(requests(10_000), concurrency=2, duration_s=0.3)
        await opened.open_loop(requests(10_000, rate_per_s=50), max_outstanding=100, duration_s=0.3)
    assert 1 <= len(closed.records) < 100
    assert len(opened.records) == 16  # due at 0, 20, … 300 ms
    assert all(record.ok for run in (closed, opened) for record in run.records)


async def test_a_cancelled_run_keeps_finished_requests_and_marks_the_others(server: Any, script: Any) -> None:
    server.behaviours = [script.complete(), sent(script, script.chunk([1]), 30.0)]
    second_started = asyncio.Event()

    def on_change(run: Run) -> None:
        if run.records and run.num_outstanding:
            second_started.set()

    async with open_session(60) as session:
        run = Run(Client(session, server.url, "tiny"), on_change)
        load = asyncio.create_task(run.closed_loop(requests(5), concurrency=1))
        await asyncio.wait_for(second_started.wait(), 20)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
    assert [record.error for record in run.records] == ["", INTERRUPTED]
    summary = summarize(run.records, 1000, None)
    assert (summary.num_ok, summary.num_failed, summary.num_interrupted) == (1, 0, 1)
    assert summary.errors == {}


async def test_the_model_and_its_context_come_from_the_server(server: Any) -> None:
    async with open_session(10) as session:
        assert await find_model(session, server.url, None) == ServedModel("tiny", 4096)
        server.max_model_len = None
        assert await find_model(session, server.url, "tiny") == ServedModel("tiny", None)
        with pytest.raises(BenchError, match="does not serve 'huge'; it serves tiny"):
            await find_model(session, server.url, "huge")


async def test_a_server_without_a_model_list_needs_the_name(server: Any) -> None:
    async with open_session(10) as session:
        assert await find_model(session, f"{server.url}/elsewhere", "tiny") == ServedModel("tiny", None)
        with pytest.raises(BenchError, match="give --model"):
            await find_model(session, f"{server.url}/elsewhere", None)


async def test_an_unreachable_server_is_one_clear_line(unused_port: int) -> None:
    async with open_session(10) as session:
        with pytest.raises(BenchError, match="cannot reach") as error:
            await find_model(session, f"http://127.0.0.1:{unused_port}", None)
    assert "\n" not in str(error.value)


async def test_a_record_survives_json(server: Any) -> None:
    record = await send_one(server.url)
    line = json.loads(json.dumps(record.as_json(record.sent_s)))
    assert (line["sent_ms"], line["output_tokens"], line["error"]) == (0, 4, "")
    assert len(line["itl_ms"]) == 3
    assert line["ttft_ms"] + sum(line["itl_ms"]) <= line["e2e_ms"] + 0.01


def test_a_planned_request_without_a_time_is_a_bug_in_an_open_loop() -> None:
    async def run() -> None:
        async with open_session(1) as session:
            planned = iter([PlannedRequest(0, None, [1], 1)])
            await Run(Client(session, "http://127.0.0.1:1", "tiny")).open_loop(planned, max_outstanding=1)

    with pytest.raises(ExceptionGroup) as error:
        asyncio.run(run())
    assert error.group_contains(AssertionError)
