"""The HTTP side over a real server, with fake workers behind it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdserve.gateway.api.text import Tokenizer
from pdserve.gateway.server import eos_token_ids
from pdserve.transfer.messages import Cancel, Failed, Prefill, Reserve
from tests.gateway.fake_worker import MODEL, counter, token_at
from tests.gateway.harness import until
from tests.gateway.site import Site, running_site

COMPLETION = {"model": MODEL, "prompt": list(range(1, 41)), "max_tokens": 10}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10}
IDS = [token_at(40 + i) for i in range(10)]


@pytest.fixture
async def site(tmp_path: Path, model_dir: Path, model_text: Tokenizer) -> AsyncIterator[Site]:
    async with running_site(tmp_path, model_dir, model_text, max_body_bytes=100_000, shutdown_s=1.0) as site:
        yield site


def events(body: str) -> list[Any]:
    """The JSON of every event of a stream, and "[DONE]"."""
    datas = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


async def open_raw(
    site: Site, body: dict[str, Any], receive_buffer: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a connection of our own, to hang up or to leave unread."""
    raw = socket.socket()
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", site.port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=1024)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    writer.write(head.encode() + b"\r\n\r\n" + data)
    await writer.drain()
    return reader, writer


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_whole_answer_has_the_text_of_all_tokens_and_exact_usage(site: Site) -> None:
    await site.system.pair()
    answer = (await site.client.post("/v1/completions", json=COMPLETION)).json()
    assert answer["choices"][0]["text"] == site.text_of(IDS) == "opqrstuvwx"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (40, 10)
    assert await site.metric('pdserve_requests_total{outcome="ok"}') == 1
    assert await site.metric("pdserve_requests_inflight") == 0
    assert await site.metric("pdserve_ttft_seconds_count") == 1


async def test_stream_says_the_same_as_the_whole_answer(site: Site) -> None:
    await site.system.pair()
    whole = (await site.client.post("/v1/completions", json={**COMPLETION, "n": 2})).json()
    body = {**COMPLETION, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    answer = await site.client.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(answer.text)
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
    assert await site.metric('pdserve_requests_total{outcome="ok"}') == 2
    assert await site.metric('pdserve_requests_total{outcome="disconnect"}') == 0


async def test_openai_client_chats_streamed_and_not(site: Site) -> None:
    await site.system.pair()
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{site.port}/v1", api_key="x", max_retries=0)
    whole = await client.chat.completions.create(**CHAT)
    stream = await client.chat.completions.create(**CHAT, stream=True)
    pieces = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
    assert "".join(piece or "" for piece in pieces) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 10
    await client.close()


async def test_batch_is_answered_prompt_major(site: Site) -> None:
    decode, _ = await site.system.pair()
    prompts = [list(range(1, 21)), list(range(1, 31))]
    body = {**COMPLETION, "prompt": prompts, "n": 2, "return_token_ids": True}
    answer = (await site.client.post("/v1/completions", json=body)).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["token_ids"][0] for c in answer["choices"]] == [token_at(20)] * 2 + [token_at(30)] * 2
    assert answer["usage"]["prompt_tokens"] == 50
    assert len(decode.of(Reserve)) == 2


async def test_one_failing_prompt_of_a_batch_cancels_all_and_is_one_error(site: Site) -> None:
    decode = site.system.decode(answering=False)
    await site.system.ready(1)
    body = {**COMPLETION, "prompt": [[1] * 20, [2] * 30]}
    call = asyncio.create_task(site.client.post("/v1/completions", json=body))
    await until(lambda: len(decode.live) == 2)
    first = decode.of(Reserve)[0]
    decode.live.discard((first.request, 1))
    decode.dealer.send(Failed(first.request, 1, "nan_logits", "not finite", False))
    answer = await call
    assert answer.status_code == 500
    assert "not finite" in answer.json()["error"]["message"]
    await site.system.idle()


async def test_stop_string_ends_the_text_and_is_not_billed_past_it(site: Site) -> None:
    decode, _ = await site.system.pair()
    stop = site.text_of(IDS[3:5])
    answer = (await site.client.post("/v1/completions", json={**COMPLETION, "stop": stop})).json()
    assert answer["choices"][0]["text"] == site.text_of(IDS[:3])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 5
    await site.system.idle()
    assert decode.live == set()


async def test_decode_killed_mid_stream_is_not_seen_by_the_client(site: Site) -> None:
    first, second = site.system.decode("d0", stop_after=4), site.system.decode("d1", stop_after=4)
    await site.system.ready(2)
    body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
    call = asyncio.create_task(site.client.post("/v1/completions", json=body))
    await until(lambda: any(d.started for d in (first, second)))
    await asyncio.sleep(0.1)
    dying, other = (first, second) if first.live else (second, first)
    other.stop_after = 1000
    dying.kill()
    *chunks, usage, _ = events((await call).text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == site.text_of(IDS)
    assert usage["usage"]["completion_tokens"] == 10


# --- errors ----------------------------------------------------------------------------------------------------------


async def test_every_refusal_has_openais_shape_and_a_request_id(site: Site) -> None:
    await site.system.pair()
    calls = {
        404: ("GET", "/nothing", {}),
        405: ("GET", "/v1/completions", {}),
        400: ("POST", "/v1/completions", {"content": b"{", "headers": {"content-type": "application/json"}}),
        415: ("POST", "/v1/completions", {"content": b"x=1", "headers": {"content-type": "text/plain"}}),
        413: ("POST", "/v1/completions", {"content": b" " * 100_001}),
    }
    for status, (method, path, options) in calls.items():
        answer = await site.client.request(method, path, **options)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
    unknown = await site.client.post("/v1/chat/completions", json={**CHAT, "model": "nope"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_body_without_a_length_is_cut_off_at_the_limit(site: Site) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 1000

    answer = await site.client.post("/v1/completions", content=endless())
    assert answer.status_code == 413


@pytest.mark.parametrize(("sent", "echoed"), [("mine-1", True), ("two words", False), ("", False), ("x" * 300, False)])
async def test_usable_request_ids_are_echoed_and_others_replaced(site: Site, sent: str, echoed: bool) -> None:
    answer = await site.client.get("/health", headers={"x-request-id": sent})
    assert (answer.headers["x-request-id"] == sent) is echoed
    assert len(answer.headers["x-request-id"]) >= 6


@pytest.mark.parametrize("stream", [False, True])
async def test_no_worker_is_503_with_retry_after_streamed_or_not(site: Site, stream: bool) -> None:
    assert (await site.client.get("/health")).status_code == 200
    assert (await site.client.get("/ready")).status_code == 503
    answer = await site.client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.headers["content-type"] == "application/json"
    assert await site.metric('pdserve_requests_total{outcome="unavailable"}') == 1


@pytest.mark.parametrize(
    ("options", "limit"), [({"max_model_len": 45}, "45"), ({"num_blocks": 3, "max_model_len": 500}, "48")]
)
async def test_request_that_can_never_fit_is_400_naming_the_limit(
    site: Site, options: dict[str, int], limit: str
) -> None:
    site.system.decode(**options)
    await site.system.ready(1)
    answer = await site.client.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert answer.status_code == 400
    assert limit in answer.json()["error"]["message"]


async def test_failure_before_the_first_token_of_a_stream_is_a_status(site: Site) -> None:
    decode = site.system.decode(stop_after=0)
    await site.system.ready(1)
    call = asyncio.create_task(site.client.post("/v1/completions", json={**COMPLETION, "stream": True}))
    await until(lambda: decode.started)
    (key,) = decode.live
    decode.live.clear()
    decode.dealer.send(Failed(*key, "nan_logits", "not finite", False))
    answer = await call
    assert answer.status_code == 500
    assert "not finite" in answer.json()["error"]["message"]


async def test_failure_later_is_the_last_event_after_all_accepted_text(site: Site) -> None:
    decode = site.system.decode(stop_after=4)
    await site.system.ready(1)
    call = asyncio.create_task(site.client.post("/v1/completions", json={**COMPLETION, "stream": True}))
    await until(lambda: decode.started and all(len(o) == 4 for os in decode.started.values() for o in os))
    (key,) = decode.live
    decode.live.clear()
    decode.dealer.send(Failed(*key, "nan_logits", "not finite", False))
    answer = await call
    assert answer.status_code == 200
    *chunks, error = events(answer.text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == site.text_of(IDS[:4])
    assert "not finite" in error["error"]["message"]
    assert await site.metric('pdserve_requests_total{outcome="error"}') == 1


async def test_fault_of_our_own_is_500_logged_and_releases_everything(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await site.system.pair()

    def broken(*_: object) -> bool:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("pdserve.gateway.reply.Reply.token", broken)
    answer = await site.client.post("/v1/completions", json=COMPLETION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "a bug" not in answer.text
    assert "ZeroDivisionError: a bug" in caplog.text
    await site.system.idle()
    assert await site.metric("pdserve_requests_inflight") == 0
    monkeypatch.undo()
    assert (await site.client.post("/v1/completions", json=COMPLETION)).status_code == 200


# --- clients that go away --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["reserving", "prefilling", "decoding"])
async def test_disconnect_cancels_both_legs_at_once(site: Site, stream: bool, stage: str) -> None:
    decode, prefill = await site.system.pair()
    decode.answering = stage != "reserving"
    prefill.answering = stage == "decoding"
    decode.stop_after = 4
    _, writer = await open_raw(site, {**COMPLETION, "stream": stream})
    reached = {
        "reserving": lambda: decode.of(Reserve),
        "prefilling": lambda: prefill.of(Prefill),
        "decoding": lambda: any(len(o) == 4 for outputs in decode.started.values() for o in outputs),
    }
    await until(reached[stage])
    writer.transport.abort()
    await until(lambda: decode.of(Cancel))
    if stage == "prefilling":
        await until(lambda: prefill.of(Cancel))
    await site.system.idle()
    await until(lambda: site.system.num_legs == 0)
    assert await site.metric("pdserve_requests_inflight") == 0
    assert await site.metric('pdserve_requests_total{outcome="disconnect"}') == 1


async def test_client_that_does_not_read_is_cut_off_and_cancelled(site: Site) -> None:
    decode = site.system.decode(max_model_len=1_000_000, num_blocks=100_000, burst=500)
    await site.system.ready(1)
    reader, writer = await open_raw(site, {**COMPLETION, "max_tokens": 500_000, "stream": True}, receive_buffer=4096)
    await until(lambda: decode.of(Cancel), timeout_s=30)
    await site.system.idle()
    assert await site.metric('pdserve_requests_total{outcome="disconnect"}') == 1
    await until(lambda: not site.server.server_state.tasks)
    connections = len(site.server.server_state.connections)
    assert connections <= 1, "only the connection that asks for metrics is left"
    assert b"[DONE]" not in await reader.read(), "what the kernel still held, and then the end"
    writer.close()


# --- other endpoints -------------------------------------------------------------------------------------------------


async def test_pools_shows_workers_their_links_and_their_load(site: Site) -> None:
    decode, prefill = await site.system.pair()
    assert (await site.client.get("/ready")).status_code == 200
    workers = {w["name"]: w for w in (await site.client.get("/pools")).json()["workers"]}
    assert set(workers) == {"d0", "p0"}
    assert workers["p0"]["links"] == [
        {"worker": decode.worker, "link": "zmq", "state": "linked", "detail": "", "bytes_sent": 0}
    ]
    assert (workers["d0"]["role"], workers["d0"]["id"], workers["d0"]["state"]) == ("decode", decode.worker, "ready")
    assert workers["d0"]["pid"] == int(decode.worker.partition("#")[2], 16)
    assert workers["d0"]["blocks"] == {"total": 64, "free": 64, "held": 0}
    prefill.kill()
    await until(lambda: len(site.system.pool.workers) == 1)
    assert len((await site.client.get("/pools")).json()["workers"]) == 1


async def test_metrics_page_includes_what_workers_report(site: Site) -> None:
    site.system.decode(families=[counter("pdserve_transfer_bytes", 5, link="zmq"), counter("bad name", 1)])
    await site.system.ready(1)
    page = (await site.client.get("/metrics")).text
    assert 'pdserve_transfer_bytes_total{link="zmq",model="m",role="decode",worker="d0"} 5.0' in page
    assert "bad name" not in page


async def test_models_are_listed_with_their_limits(site: Site) -> None:
    listed = (await site.client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == [MODEL]
    assert listed["data"][0]["max_model_len"] is None, "unknown while there is no worker"
    site.system.decode(max_model_len=777)
    await site.system.ready(1)
    assert (await site.client.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == 777
    assert (await site.client.get("/v1/models/nope")).status_code == 404


# --- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finishing", [True, False])
async def test_stopping_lets_streams_finish_and_cuts_those_that_take_too_long(site: Site, finishing: bool) -> None:
    decode = site.system.decode(stop_after=2)
    await site.system.ready(1)
    call = asyncio.create_task(site.client.post("/v1/completions", json={**COMPLETION, "stream": True}))
    await until(lambda: any(len(o) == 2 for outputs in decode.started.values() for o in outputs))
    site.server.request_stop()
    await asyncio.sleep(0.3)
    if finishing:
        decode.stop_after = 1000
    last = events((await call).text)[-1]
    await asyncio.wait_for(asyncio.shield(site.serving), 30)
    if finishing:
        assert last == "[DONE]"
    else:
        assert last["error"]["code"] == "shutdown"
    await site.system.idle()
    assert await site.system.pool.released(1.0)


def run_gateway(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pdserve.gateway", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_process_serves_refuses_a_taken_port_in_one_line_and_ends_cleanly(model_dir: Path, tmp_path: Path) -> None:
    flags = ("--model", str(model_dir), "--listen", f"ipc://{tmp_path}/gw")
    first = run_gateway(*flags, "--port", "0")
    try:
        assert first.stdout is not None
        line = first.stdout.readline()
        port = line.partition("127.0.0.1:")[2].partition(",")[0]
        assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
        second = run_gateway(*flags, "--port", port)
        _, complaint = second.communicate(timeout=60)
        assert second.returncode == 2
        assert complaint.splitlines() == [
            f"pdserve.gateway: error: cannot listen on 127.0.0.1 port {port}: Address already in use"
        ]
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=30)
        assert first.returncode == 0
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
            first.communicate()


def test_gateway_does_not_load_torch(model_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pdserve.gateway import server\n"
        "assert 'torch' not in sys.modules, 'imported with the modules'\n"
        f"server.load_tokenizer(Path({str(model_dir)!r}), None, False).encode('a')\n"
        "assert sys.modules['torch'] is None, 'imported with the tokenizer'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 7}}')
    assert eos_token_ids(tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert eos_token_ids(tmp_path) == {1, 2}
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    assert eos_token_ids(tmp_path) == frozenset()
