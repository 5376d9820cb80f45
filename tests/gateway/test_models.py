"""Two models behind one gateway, over a real server, with fake workers of each."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.gateway.aliases import Alias
from pdserve.gateway.api.text import Tokenizer
from pdserve.gateway.membership import ModelIdentity
from pdserve.gateway.models import Caller
from pdserve.gateway.server import LoadedModel
from pdserve.transfer.messages import Peers, Reserve
from tests.gateway.conftest import save_tokenizer
from tests.gateway.fake_worker import MODEL, FakeDecode, FakePrefill, counter, layout, token_at
from tests.gateway.harness import until
from tests.gateway.site import Site, running_site

OTHER = "n"
OTHER_KV = {"model": OTHER, "layout": layout("a" * 64, "float16")}
PROMPT = "the end"


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model with another tokenizer, other files and another KV layout."""
    path = save_tokenizer(tmp_path_factory.mktemp("model") / OTHER, "llama_like")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    return LoadedModel(ModelIdentity(OTHER, str(path), "a" * 64), Tokenizer(path), frozenset({2}))


@pytest.fixture
async def site(tmp_path: Path, model_dir: Path, model_text: Tokenizer, other: LoadedModel) -> AsyncIterator[Site]:
    aliases = (Alias("chat", {MODEL: 1, OTHER: 1}), Alias("stable", {MODEL: 1, OTHER: 0}))
    options: dict[str, Any] = {"aliases": aliases, "max_queue": 4, "queue_timeout_s": 2.0, "shutdown_s": 1.0}
    async with running_site(tmp_path, model_dir, model_text, other, **options) as site:
        yield site


async def pairs(site: Site) -> tuple[FakeDecode, FakePrefill, FakeDecode, FakePrefill]:
    """One of each for each model, linked and ready."""
    first, second = site.system.decode("d0"), site.system.decode("d1", **OTHER_KV)
    workers = first, site.system.prefill("p0"), second, site.system.prefill("p1", **OTHER_KV)
    for model in (MODEL, OTHER):
        await site.system.linked(1, model)
    return workers


async def complete(site: Site, model: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, **fields}
    answer = await site.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prompts(worker: FakeDecode) -> list[list[int]]:
    return [message.prompt for message in worker.of(Reserve) if isinstance(message, Reserve)]


# --- each model by itself --------------------------------------------------------------------------------------------


async def test_a_request_goes_to_workers_of_its_model_with_that_models_tokens_and_text(
    site: Site, other: LoadedModel
) -> None:
    first, _, second, _ = await pairs(site)
    for model, decode, tokenizer in ((MODEL, first, site.tokenizer), (OTHER, second, other.tokenizer)):
        answer = await complete(site, model)
        ids = tokenizer.encode(PROMPT)
        assert prompts(decode) == [ids]
        tokens = [token_at(len(ids) + i) for i in range(4)]
        assert answer["choices"][0]["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
        assert answer["model"] == model
        assert await site.metric(f'pdserve_requests_total{{outcome="ok",model="{model}"}}') == 1
        assert await site.metric(f'pdserve_generated_tokens_total{{model="{model}"}}') == 4
    assert site.tokenizer.encode(PROMPT) != other.tokenizer.encode(PROMPT)


async def test_texts_are_tokenised_by_the_model_they_name_or_by_the_first(site: Site, other: LoadedModel) -> None:
    for fields, tokenizer in (({}, site.tokenizer), ({"model": OTHER}, other.tokenizer)):
        tokens = (await site.client.post("/tokenize", json={"prompt": PROMPT, **fields})).json()["tokens"]
        assert tokens == tokenizer.encode(PROMPT)
        text = (await site.client.post("/detokenize", json={"tokens": tokens, **fields})).json()["prompt"]
        assert text == tokenizer.decode(tokens, skip_special_tokens=False)


async def test_limits_are_those_of_the_model_asked_for(site: Site) -> None:
    site.system.decode("d0", max_model_len=20)
    site.system.decode("d1", max_model_len=500, **OTHER_KV)
    await site.system.ready(2)
    lengths = {card["id"]: card["max_model_len"] for card in (await site.client.get("/v1/models")).json()["data"]}
    assert lengths == {MODEL: 20, OTHER: 500, "chat": 20, "stable": 20}
    body = {"prompt": PROMPT, "max_tokens": 30}
    assert (await site.client.post("/v1/completions", json={"model": MODEL, **body})).status_code == 400
    assert (await site.client.post("/v1/completions", json={"model": OTHER, **body})).status_code == 200


async def test_every_name_is_listed_with_its_files_and_others_are_unknown(site: Site, other: LoadedModel) -> None:
    roots = {card["id"]: card["root"] for card in (await site.client.get("/v1/models")).json()["data"]}
    assert list(roots) == [MODEL, OTHER, "chat", "stable"]
    assert roots[OTHER] == (await site.client.get(f"/v1/models/{OTHER}")).json()["root"] == other.identity.path
    assert roots["stable"] == roots[MODEL] != roots[OTHER]
    assert (await site.client.get("/v1/models/nope")).status_code == 404
    refused = await site.client.post("/v1/completions", json={"model": "nope", "prompt": PROMPT})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    missing = await site.client.post("/v1/completions", json={"prompt": PROMPT})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")


# --- workers ---------------------------------------------------------------------------------------------------------


async def test_prefill_workers_hear_only_of_decode_workers_of_their_own_model(site: Site) -> None:
    first, prefill, second, other_prefill = await pairs(site)
    third = site.system.decode("d2", **OTHER_KV)
    await until(lambda: {p.worker for p in other_prefill.of(Peers)[-1].decode} == {second.worker, third.worker})
    assert {p.worker for message in prefill.of(Peers) for p in message.decode} == {first.worker}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "x"}, ["'x'", "'m' and 'n'"]),
        ({"model": OTHER}, ["fingerprint", "f" * 12, "a" * 12, "/n"]),
        ({"model": OTHER, "layout": layout("a" * 64, "float32")}, ["d1#", "float32", "float16"]),
    ],
)
async def test_worker_is_checked_against_the_model_it_says_it_serves(
    site: Site, options: dict[str, Any], words: list[str]
) -> None:
    site.system.decode("d0")
    site.system.decode("d1", **OTHER_KV)
    await site.system.ready(2)
    worker = site.system.decode("d2", **options)
    await until(lambda: worker.denied)
    assert worker.denied is not None
    assert worker.denied.fatal
    assert all(word in worker.denied.reason for word in ["d2#", *words]), worker.denied.reason


async def test_pools_and_metrics_say_which_model_a_worker_serves(site: Site) -> None:
    site.system.decode("d0", families=[counter("pdserve_x", 1)])
    site.system.decode("d1", families=[counter("pdserve_x", 2)], **OTHER_KV)
    await site.system.ready(2)
    pools = (await site.client.get("/pools")).json()
    assert {worker["name"]: worker["model"] for worker in pools["workers"]} == {"d0": MODEL, "d1": OTHER}
    assert pools["aliases"] == {"chat": {MODEL: 1, OTHER: 1}, "stable": {MODEL: 1, OTHER: 0}}
    assert await site.metric(f'pdserve_x_total{{model="{OTHER}"}}') == 2


async def test_a_model_without_workers_is_a_503_that_names_it_while_the_other_one_serves(site: Site) -> None:
    assert (await site.client.get("/ready")).status_code == 503
    site.system.decode("d0")
    await site.system.ready(1)
    refused = await site.client.post("/v1/completions", json={"model": OTHER, "prompt": PROMPT})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert f"'{OTHER}'" in refused.json()["error"]["message"]
    assert await site.metric(f'pdserve_requests_total{{outcome="unavailable",model="{OTHER}"}}') == 1
    assert (await complete(site, MODEL))["model"] == MODEL
    ready = await site.client.get("/ready")
    assert (ready.status_code, ready.json()["models"]) == (200, [MODEL])
    statuses = {
        name: (await site.client.get("/ready", params={"model": name})).status_code
        for name in (MODEL, OTHER, "chat", "stable", "nope")
    }
    assert statuses == {MODEL: 200, OTHER: 503, "chat": 503, "stable": 200, "nope": 404}


async def test_a_model_whose_queue_is_full_holds_up_nobody_elses_requests(site: Site) -> None:
    stuck = site.system.decode("d0", max_sequences=1, answering=False)
    site.system.decode("d1", **OTHER_KV)
    await site.system.ready(2)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    calls = [asyncio.create_task(site.client.post("/v1/completions", json=body)) for _ in range(8)]
    await until(lambda: any(call.done() for call in calls))
    assert len(stuck.of(Reserve)) < 4
    assert (await site.client.get("/pools")).json()["queued"] == 4
    for _ in range(3):
        assert (await complete(site, OTHER))["model"] == OTHER
    statuses = Counter(call.result().status_code for call in calls if call.done())
    assert statuses.keys() == {429}, "those of the stuck model still wait, and only they were too many"
    answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {429, 503}


# --- retries and moves -----------------------------------------------------------------------------------------------


async def test_a_stream_whose_worker_dies_goes_on_with_a_worker_of_its_model_only(site: Site) -> None:
    bystander = site.system.decode("d0")
    dying = site.system.decode("d1", stop_after=2, **OTHER_KV)
    await site.system.ready(2)
    call = asyncio.create_task(complete(site, OTHER, max_tokens=8))
    await until(lambda: any(len(o) == 2 for outputs in dying.started.values() for o in outputs))
    dying.kill()
    await until(lambda: len(site.system.pool.workers) == 1)
    await asyncio.sleep(0.2)
    assert bystander.of(Reserve) == []
    rescuer = site.system.decode("d2", **OTHER_KV)
    answer = await call
    assert (answer["model"], answer["usage"]["completion_tokens"]) == (OTHER, 8)
    assert len(rescuer.of(Reserve)) == 1
    assert bystander.of(Reserve) == []
    assert await site.metric(f'pdserve_retries_total{{model="{OTHER}"}}') == 1
    assert await site.metric(f'pdserve_retries_total{{model="{MODEL}"}}') == 0


async def test_a_draining_worker_keeps_its_streams_until_one_of_its_own_model_has_room(site: Site) -> None:
    bystander = site.system.decode("d0")
    leaving = site.system.decode("d1", stop_after=3, **OTHER_KV)
    await site.system.ready(2)
    call = asyncio.create_task(complete(site, OTHER, max_tokens=8))
    await until(lambda: leaving.started)
    assert (await site.client.post("/admin/drain/d1", json={})).status_code == 202
    await asyncio.sleep(0.5)
    assert bystander.of(Reserve) == []
    assert len(leaving.live) == 1
    newcomer = site.system.decode("d2", **OTHER_KV)
    assert (await call)["usage"]["completion_tokens"] == 8
    assert len(newcomer.of(Reserve)) == 1


# --- aliases ---------------------------------------------------------------------------------------------------------


async def served(site: Site, users: int, alias: str = "chat", **fields: Any) -> dict[str, str]:
    """User → the model that the answer names."""
    names = [f"u{i}" for i in range(users)]
    answers = await asyncio.gather(*(complete(site, alias, user=name, max_tokens=1, **fields) for name in names))
    return {name: answer["model"] for name, answer in zip(names, answers, strict=True)}


async def test_a_user_of_an_alias_stays_with_one_model_and_the_answer_says_which(site: Site) -> None:
    first, _, second, _ = await pairs(site)
    site_queue = 4  # more at once than may wait would be refused
    chosen = await served(site, site_queue * 2)
    assert set(chosen.values()) == {MODEL, OTHER}
    assert len(first.of(Reserve)) == list(chosen.values()).count(MODEL)
    for _ in range(2):
        assert await served(site, site_queue * 2) == chosen
    assert len(first.of(Reserve)) + len(second.of(Reserve)) == site_queue * 6


async def test_a_stream_names_the_model_behind_the_alias_in_every_chunk(site: Site) -> None:
    await pairs(site)
    body = {"model": "stable", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    answer = await site.client.post("/v1/completions", json=body)
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {MODEL}


async def test_weights_change_while_requests_run_and_hold_for_those_that_come_after(site: Site) -> None:
    first, _, second, _ = await pairs(site)
    first.stop_after = 2
    running = asyncio.create_task(complete(site, "stable", max_tokens=5))
    await until(lambda: first.started)
    answer = await site.client.post("/admin/aliases/stable", json={OTHER: 100})
    assert (answer.status_code, answer.json()) == (200, {"alias": "stable", "weights": {OTHER: 100}})
    assert set((await served(site, 4, "stable")).values()) == {OTHER}
    first.stop_after = 1000
    assert (await running)["model"] == MODEL, "what runs stays where it is"
    assert (await site.client.get("/pools")).json()["aliases"]["stable"] == {OTHER: 100}
    assert len(second.of(Reserve)) == 4


@pytest.mark.parametrize(
    ("path", "weights", "status", "word"),
    [
        ("/admin/aliases/nope", {MODEL: 1}, 404, "chat, stable"),
        (f"/admin/aliases/{MODEL}", {MODEL: 1}, 404, "no alias"),
        ("/admin/aliases/chat", {"x": 1}, 400, "'x'"),
        ("/admin/aliases/chat", {"chat": 1}, 400, "'chat'"),
        ("/admin/aliases/chat", {MODEL: -1}, 400, "whole number"),
        ("/admin/aliases/chat", {MODEL: 0.5, OTHER: 0.5}, 400, "whole number"),
        ("/admin/aliases/chat", {MODEL: True}, 400, "whole number"),
        ("/admin/aliases/chat", {MODEL: 0, OTHER: 0}, 400, "more than 0"),
        ("/admin/aliases/chat", {}, 400, "more than 0"),
        ("/admin/aliases/chat", [1], 400, "object"),
    ],
)
async def test_weights_that_make_no_sense_are_refused_and_the_old_ones_hold(
    site: Site, path: str, weights: object, status: int, word: str
) -> None:
    answer = await site.client.post(path, json=weights)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]
    assert (await site.client.get("/pools")).json()["aliases"]["chat"] == {MODEL: 1, OTHER: 1}


async def test_a_page_of_another_site_cannot_change_weights(site: Site) -> None:
    answer = await site.client.post("/admin/aliases/chat", content=b'{"m": 1}', headers={"content-type": "text/plain"})
    assert answer.status_code == 415


@pytest.mark.parametrize(
    ("fields", "client", "key"),
    [
        ({"user": "ann", "prompt_cache_key": "c"}, "key:team", "user:ann"),
        ({"prompt_cache_key": "c"}, "key:team", "user:c"),
        ({"user": ""}, "key:team", "key:team"),
        ({"user": 7}, "key:team", "key:team"),
        ({}, "ip:10.0.0.1", "id:r1"),
    ],
)
def test_who_stays_with_a_model_is_the_user_else_the_api_key_else_only_the_request(
    fields: dict[str, Any], client: str, key: str
) -> None:
    assert Caller(client, "r1").key(fields) == key
