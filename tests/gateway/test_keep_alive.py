"""Comments on a silent stream: a client, or a proxy before it, does not take a long prompt for a dead connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.gateway.api.text import Tokenizer
from pdserve.transfer.messages import Failed, Reserve
from tests.gateway.fake_worker import MODEL
from tests.gateway.harness import until
from tests.gateway.site import Site, running_site

COMPLETION = {"model": MODEL, "prompt": list(range(1, 41)), "max_tokens": 10, "stream": True}
COMMENT = ": keep-alive\n\n"


@pytest.fixture
async def site(tmp_path: Path, model_dir: Path, model_text: Tokenizer) -> AsyncIterator[Site]:
    async with running_site(tmp_path, model_dir, model_text, shutdown_s=1.0, keep_alive_s=0.1) as site:
        yield site


async def test_while_a_prompt_is_computed_comments_come_and_what_fails_then_is_an_event(site: Site) -> None:
    decode, prefill = await site.system.pair()
    prefill.answering = False
    async with site.client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        parts, seen = answer.aiter_text(), ""
        while len(seen) < 2 * len(COMMENT):  # several may come at once
            seen += await anext(parts)
        assert seen.replace(COMMENT, "") == ""
        (reserve,) = decode.of(Reserve)
        decode.dealer.send(Failed(reserve.request, reserve.attempt, "nan_logits", "not finite", False))
        rest = "".join([part async for part in parts])
    error = json.loads(rest.replace(COMMENT, "").removeprefix("data: "))
    assert "not finite" in error["error"]["message"]
    await site.system.idle()


async def test_silence_between_tokens_is_bridged_and_costs_no_text(site: Site) -> None:
    decode = site.system.decode(token_interval_s=0.5)
    await site.system.ready(1)
    answer = await site.client.post("/v1/completions", json=COMPLETION | {"max_tokens": 3})
    assert answer.text.count(COMMENT) >= 3
    events = [json.loads(block[6:]) for block in answer.text.split("\n\n") if block.startswith("data: {")]
    ids = [token for output in decode.jobs.values() for token in range(43 - len(output.prompt))]
    assert len(ids) == 3
    assert sum(len(event["choices"][0]["text"]) for event in events) == 3


async def test_before_a_worker_has_the_prompt_silence_keeps_the_status_open(site: Site) -> None:
    decode, _prefill = await site.system.pair()
    decode.answering = False
    asking = asyncio.create_task(site.client.post("/v1/completions", json=COMPLETION))
    await until(lambda: decode.of(Reserve))
    done, _ = await asyncio.wait([asking], timeout=0.4)
    assert not done
    (reserve,) = decode.of(Reserve)
    decode.dealer.send(Failed(reserve.request, reserve.attempt, "nan_logits", "not finite", False))
    assert (await asking).status_code == 500
