"""What stands in front of the routes, over a real server: limits of clients, time limit, CORS and the request log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdserve.engine.config import LogEvent
from pdserve.gateway.api.text import Tokenizer
from pdserve.gateway.api_keys import line_for, new_key
from pdserve.gateway.config import parse_arguments
from pdserve.gateway.front_flags import FrontConfig
from pdserve.gateway.rate_limit_gate import account_name
from pdserve.gateway.rate_limits import ClientLimits
from pdserve.transfer.messages import Prefill, Reserve
from tests.gateway.fake_worker import MODEL
from tests.gateway.harness import until
from tests.gateway.site import Site, running_site

COMPLETION = {"model": MODEL, "prompt": list(range(1, 41)), "max_tokens": 10}
PAGE = "https://page.example"
ALICE, BOB, CAROL = new_key(), new_key(), new_key()


class Sites:
    """Starts gateways with what a test wants in front of them."""

    def __init__(self, directory: Path, model_dir: Path, text: Tokenizer) -> None:
        self._directory = directory
        self._model_dir = model_dir
        self._text = text

    def __call__(self, *, api_keys: Path | None = None, **front: Any) -> Any:
        options = {"front": FrontConfig(**front), "api_keys": api_keys, "shutdown_s": 1.0}
        return running_site(self._directory, self._model_dir, self._text, **options)


@pytest.fixture
def sites(tmp_path: Path, model_dir: Path, model_text: Tokenizer) -> Sites:
    return Sites(tmp_path, model_dir, model_text)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """Alice has limits of her own, Bob those of all, Carol none at all."""
    path = tmp_path / "keys"
    lines = [
        f"{line_for('alice', ALICE)} requests-per-minute=2 tokens-per-minute=500",
        line_for("bob", BOB),
        f"{line_for('carol', CAROL)} requests-per-minute=none",
    ]
    path.write_text("\n".join(lines))
    return path


def test_every_flag_is_a_setting_and_all_are_off_without_it() -> None:
    flags = [
        "--requests-per-minute=5", "--tokens-per-minute=600", "--max-concurrent=7", "--request-timeout-s=2.5",
        "--cors-origin=*", "--cors-origin=http://localhost:3000", "--log-prompts",
    ]  # fmt: skip
    expected = FrontConfig(ClientLimits(5, 600, 7), 2.5, ("*", "http://localhost:3000"), True)
    assert parse_arguments(["--model=m", *flags])[0].front == expected
    assert parse_arguments(["--model=m"])[0].front == FrontConfig()


async def complete(site: Site, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return await site.client.post("/v1/completions", json={**COMPLETION, **fields}, headers=headers)


def limit_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit-")}


# --- limits of clients -----------------------------------------------------------------------------------------------


async def test_every_answer_says_what_is_left_and_the_request_beyond_it_is_a_429(sites: Sites) -> None:
    async with sites(limits=ClientLimits(requests_per_minute=2, tokens_per_minute=1000)) as site:
        decode, _ = await site.system.pair()
        first = await complete(site)
        assert first.status_code == 200
        assert limit_headers(first) == {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-remaining-requests": "1",
            "x-ratelimit-reset-requests": first.headers["x-ratelimit-reset-requests"],
            "x-ratelimit-limit-tokens": "1000",
            "x-ratelimit-remaining-tokens": first.headers["x-ratelimit-remaining-tokens"],
            "x-ratelimit-reset-tokens": first.headers["x-ratelimit-reset-tokens"],
        }
        assert 950 <= int(first.headers["x-ratelimit-remaining-tokens"]) < 1000, "50 used, some came back since"
        assert (await complete(site, max_tokens="x")).status_code == 400
        refused = await complete(site)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "requests")
        assert "requests per minute: limit 2" in error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-request-id"]
        assert len(decode.of(Reserve)) == 1
        assert (await site.client.get("/v1/models")).status_code == 200
        assert await site.metric('pdserve_rate_limited_total{limit="requests"}') == 1


async def test_what_is_refused_is_refused_before_it_is_tokenised(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sites(limits=ClientLimits(tokens_per_minute=50)) as site:
        await site.system.pair()
        assert (await complete(site)).status_code == 200
        encoded: list[str] = []
        monkeypatch.setattr(site.tokenizer, "encode", lambda text, **_: encoded.append(text) or [1])
        refused = await complete(site, prompt="hello")
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
    async with sites(limits=ClientLimits(tokens_per_minute=50)) as site:
        too_much = await complete(site, prompt=["hello", "world"], n=3, max_tokens=20)
        assert "limit 50, remaining 50, requested 122" in too_much.json()["error"]["message"]
        assert encoded == []
        assert await site.metric('pdserve_rate_limited_total{limit="tokens"}') == 1
        assert await site.metric('pdserve_requests_total{outcome="rate_limited"}') == 1


async def test_tokens_are_reserved_while_a_request_runs_and_settled_to_what_it_used(sites: Sites) -> None:
    async with sites(limits=ClientLimits(tokens_per_minute=600)) as site:
        decode, _ = await site.system.pair()
        decode.eos_at = 44  # the fifth token ends it
        answer = await complete(site, max_tokens=500)
        assert answer.headers["x-ratelimit-remaining-tokens"] == "60"
        assert answer.json()["usage"]["total_tokens"] == 45
        left = int((await complete(site, max_tokens=1)).headers["x-ratelimit-remaining-tokens"])
        assert 600 - 45 - 41 <= left < 600 - 45
        decode.eos_at = None
        too_large = await complete(site, max_tokens=590)
        assert too_large.status_code == 429
        assert too_large.headers["x-should-retry"] == "false"


async def test_a_chat_without_a_limit_of_its_own_is_not_taken_for_the_longest_possible_one(sites: Sites) -> None:
    async with sites(limits=ClientLimits(tokens_per_minute=700)) as site:
        decode, _ = await site.system.pair()
        decode.eos_at = 30
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        assert (await site.client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_request_that_no_worker_took_costs_no_tokens(sites: Sites) -> None:
    async with sites(limits=ClientLimits(tokens_per_minute=60)) as site:
        assert (await complete(site)).status_code == 503
        assert (await complete(site)).status_code == 503
        await site.system.pair()
        assert (await complete(site)).status_code == 200


async def test_a_client_has_no_more_at_once_than_it_may_and_one_after_the_other_always(sites: Sites) -> None:
    async with sites(limits=ClientLimits(max_concurrent=1)) as site:
        decode, _ = await site.system.pair()
        for stream in (True, False) * 10:
            assert (await complete(site, stream=stream)).status_code == 200
        decode.stop_after = 2
        running = asyncio.create_task(complete(site))
        await until(lambda: decode.live)
        refused = await complete(site)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "1 requests at once" in refused.json()["error"]["message"]
        assert limit_headers(refused) == {}
        decode.stop_after = 100
        assert (await running).status_code == 200
        assert (await complete(site)).status_code == 200


async def test_a_stream_that_is_left_gives_its_place_back(sites: Sites) -> None:
    async with sites(limits=ClientLimits(max_concurrent=1)) as site:
        decode, _ = await site.system.pair()
        decode.stop_after = 2
        body = {**COMPLETION, "stream": True}
        async with site.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
        await site.system.idle()
        decode.stop_after = 100
        assert (await complete(site)).status_code == 200


async def test_each_key_has_its_own_limits_and_the_flags_are_for_the_others(sites: Sites, key_file: Path) -> None:
    async with sites(api_keys=key_file, limits=ClientLimits(requests_per_minute=1)) as site:
        await site.system.pair()
        assert limit_headers(await complete(site, ALICE))["x-ratelimit-limit-tokens"] == "500"
        assert [(await complete(site, ALICE)).status_code for _ in range(2)] == [200, 429]
        assert [(await complete(site, BOB)).status_code for _ in range(2)] == [200, 429]
        free = [await complete(site, CAROL) for _ in range(3)]
        assert [(answer.status_code, limit_headers(answer)) for answer in free] == [(200, {})] * 3
        assert (await complete(site, "wrong")).status_code == 401


async def test_openais_client_waits_as_it_is_told_and_gives_up_on_what_can_never_fit(sites: Sites) -> None:
    async with sites(limits=ClientLimits(tokens_per_minute=3000)) as site:
        await site.system.pair()
        assert (await complete(site, prompt=[[1] * 970] * 3)).status_code == 200
        url = f"http://127.0.0.1:{site.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=2) as client:
            for _ in range(2):
                answer = await client.completions.create(model=MODEL, prompt=[1] * 70, max_tokens=10)
                assert answer.choices[0].finish_reason == "length"
            refused_before = await site.metric('pdserve_rate_limited_total{limit="tokens"}')
            assert refused_before >= 1
            with pytest.raises(openai.RateLimitError, match="limit 3000"):
                await client.completions.create(model=MODEL, prompt=[1] * 70, max_tokens=600, n=5)
            # Told to wait until the least it may take is there, perhaps, and then that this is in vain: no third time.
            refused = await site.metric('pdserve_rate_limited_total{limit="tokens"}') - refused_before
            assert refused in (1, 2)


async def test_without_limits_no_header_is_sent(sites: Sites) -> None:
    async with sites() as site:
        await site.system.pair()
        assert limit_headers(await complete(site)) == {}


async def test_tokenising_counts_as_a_request(sites: Sites) -> None:
    async with sites(limits=ClientLimits(requests_per_minute=1)) as site:
        asked = [await site.client.post("/tokenize", json={"prompt": "x"}) for _ in range(2)]
        assert [answer.status_code for answer in asked] == [200, 429]


def test_addresses_of_one_network_are_one_client() -> None:
    assert account_name("ip:2001:db8::1") == account_name("ip:2001:db8::ffff:1") == "ip:2001:db8::/64"
    assert account_name("ip:10.0.0.1") == "ip:10.0.0.1"
    assert account_name("key:2001:db8::1") == "key:2001:db8::1"
    assert account_name("ip:") == "ip:"


# --- time limit ------------------------------------------------------------------------------------------------------


async def test_a_request_that_takes_too_long_is_a_504_and_both_legs_are_cancelled(sites: Sites) -> None:
    async with sites(request_timeout_s=1.0) as site:
        decode = site.system.decode()
        prefill = site.system.prefill(answering=False)
        await site.system.linked(1)
        answer = await complete(site, stream=True)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (504, "timeout")
        assert "1 s" in error["message"]
        assert len(prefill.of(Prefill)) == len(decode.of(Reserve)) == 1
        await site.system.idle()
        assert await site.metric('pdserve_requests_total{outcome="timeout"}') == 1


async def test_a_stream_that_takes_too_long_ends_with_an_error_after_the_tokens_that_came(sites: Sites) -> None:
    async with sites(request_timeout_s=1.5) as site:
        decode, _ = await site.system.pair()
        decode.stop_after = 3
        answer = await complete(site, stream=True)
        assert answer.status_code == 200
        *chunks, last = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
        assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == 3
        assert last["error"]["code"] == "timeout"
        await site.system.idle()


async def test_within_the_time_limit_nothing_changes(sites: Sites) -> None:
    async with sites(request_timeout_s=30) as site:
        await site.system.pair()
        assert (await complete(site)).json()["choices"][0]["text"] == "opqrstuvwx"


# --- CORS ------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def shared_site(sites: Sites, key_file: Path) -> AsyncIterator[Site]:
    limits = ClientLimits(requests_per_minute=10)
    async with sites(api_keys=key_file, limits=limits, cors_origins=(PAGE, "http://localhost:3000")) as site:
        yield site


def preflight(origin: str) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }


async def test_a_page_may_ask_before_it_has_shown_a_key(shared_site: Site) -> None:
    answer = await shared_site.client.options("/v1/chat/completions", headers=preflight(PAGE))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert {"authorization", "content-type", "x-stainless-lang"} <= {name.strip() for name in allowed.split(",")}
    assert "access-control-allow-credentials" not in answer.headers
    assert (await shared_site.client.options("/v1/models", headers=preflight("https://other"))).status_code == 400


async def test_a_page_can_read_answers_streams_and_refusals_and_their_headers(shared_site: Site) -> None:
    await shared_site.system.pair()
    for headers, stream, status in ((ALICE, True, 200), (ALICE, False, 200), (ALICE, False, 429), ("no", False, 401)):
        answer = await shared_site.client.post(
            "/v1/completions",
            json={**COMPLETION, "stream": stream},
            headers={"Authorization": f"Bearer {headers}", "Origin": PAGE},
        )
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
        assert {"x-request-id", "x-ratelimit-remaining-tokens", "retry-after"} <= exposed
        assert "x-request-id" in answer.headers
        assert status != 200 or not stream or answer.text.endswith("data: [DONE]\n\n")


async def test_other_pages_and_clients_without_one_get_no_permission(shared_site: Site) -> None:
    for headers in ({"Origin": "https://other"}, {}):
        answer = await shared_site.client.get("/v1/models", headers={**headers, "Authorization": f"Bearer {BOB}"})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


async def test_a_client_that_hangs_up_is_noticed_through_all_that_stands_in_front(shared_site: Site) -> None:
    decode, _ = await shared_site.system.pair()
    decode.stop_after = 2
    headers = {"Authorization": f"Bearer {BOB}", "Origin": PAGE}
    for stream in (True, False):
        call = shared_site.client.post("/v1/completions", json={**COMPLETION, "stream": stream}, headers=headers)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.3)
        await shared_site.system.idle()
    page = await shared_site.client.get("/metrics", headers=headers)
    assert 'pdserve_requests_total{model="m",outcome="disconnect"} 2.0' in page.text


async def test_without_the_flag_pages_get_no_permission(sites: Sites) -> None:
    async with sites() as site:
        assert (await site.client.options("/v1/models", headers=preflight(PAGE))).status_code == 405
        answer = await site.client.get("/v1/models", headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers


# --- request log -----------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[dict[str, Any]]:
    events = [r.msg for r in caplog.records if r.name == "pdserve.requests" and r.levelno == level]
    return [dict(event.fields) for event in events if isinstance(event, LogEvent)]


async def test_every_request_is_one_line_that_says_who_what_and_how_long(
    sites: Sites, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="pdserve.requests")
    async with sites(api_keys=key_file) as site:
        _, prefill = await site.system.pair()
        prefill.cached_tokens = 16
        headers = {"Authorization": f"Bearer {BOB}", "x-request-id": "mine"}
        body = {**COMPLETION, "n": 2}
        assert (await site.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        await until(lambda: lines(caplog))
        (line,) = lines(caplog)
        times = [line.pop(name) for name in ("queue_s", "ttft_s", "e2e_s")]
        assert 0 <= times[0] <= times[1] <= times[2] < 10
        assert line == {
            "id": "mine", "client": "key:bob", "endpoint": "POST /v1/completions", "model": MODEL, "status": 200,
            "outcome": "ok", "stream": False, "prompt_tokens": 40, "completion_tokens": 20, "cached_tokens": 16,
            "finish_reasons": "length,length",
        }  # fmt: skip
        caplog.clear()
        await site.client.get("/health")
        assert lines(caplog) == []
        assert [line["endpoint"] for line in lines(caplog, logging.DEBUG)] == ["GET /health"]


async def test_what_fails_is_logged_with_how_far_it_got(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pdserve.requests")
    async with sites(request_timeout_s=1.5) as site:
        assert (await complete(site, model="nope")).status_code == 404
        decode, _ = await site.system.pair()
        decode.stop_after = 3
        await complete(site, stream=True)
        leaving = asyncio.create_task(complete(site))
        await until(lambda: len(decode.of(Reserve)) == 2)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: len(lines(caplog)) == 3)
        unknown, late, gone = lines(caplog)
        assert (unknown["status"], unknown["outcome"]) == (404, "invalid")
        assert (late["status"], late["outcome"], late["completion_tokens"]) == (200, "timeout", 3)
        assert late["finish_reasons"] == "none"
        assert (gone["status"], gone["outcome"]) == (499, "disconnect")
        assert unknown["client"] == "ip:127.0.0.1"


@pytest.mark.parametrize("asked", [True, False])
async def test_prompts_are_in_the_log_only_when_asked_for_and_that_is_said_at_the_start(
    sites: Sites, caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    caplog.set_level(logging.INFO)
    async with sites(log_prompts=asked) as site:
        warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [("--log-prompts" in record.getMessage()) for record in warned] == [True] * asked
        await site.system.pair()
        assert (await complete(site, prompt="a secret of mine")).status_code == 200
        await until(lambda: lines(caplog))
        assert lines(caplog)[0].get("prompts") == (["<s>a secret of mine"] if asked else None)
        assert ("a secret of mine" in caplog.text) == asked
