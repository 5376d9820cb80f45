"""POST /tokenize and /detokenize, over a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.api.text import Tokenizer
from pdserve.gateway.tokenize_endpoints import Turns
from pdserve.transfer.messages import Reserve
from tests.gateway.fake_worker import MODEL
from tests.gateway.site import Site, running_site

TEXT = "the quick brown fox \u4f60\u597d </s>!"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def site(tmp_path: Path, model_dir: Path, model_text: Tokenizer) -> AsyncIterator[Site]:
    async with running_site(tmp_path, model_dir, model_text) as site:
        yield site


async def ask(site: Site, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await site.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_tokens_of_a_prompt_are_those_its_completion_is_computed_from(site: Site) -> None:
    decode, _ = await site.system.pair()
    found = await ask(site, "/tokenize", {"model": MODEL, "prompt": TEXT})
    await ask(site, "/v1/completions", {"model": MODEL, "prompt": TEXT, "max_tokens": 2})
    reserve = decode.of(Reserve)[0]
    assert isinstance(reserve, Reserve)
    assert found["tokens"] == list(reserve.prompt)
    assert found["count"] == len(found["tokens"]) > 5
    assert found["max_model_len"] == 1000
    assert found["token_strs"] is None


async def test_the_tokens_of_a_chat_are_those_its_answer_is_computed_from(site: Site) -> None:
    decode, _ = await site.system.pair()
    found = await ask(site, "/tokenize", CHAT)
    await ask(site, "/v1/chat/completions", {**CHAT, "max_tokens": 2})
    reserve = decode.of(Reserve)[0]
    assert isinstance(reserve, Reserve)
    assert found["tokens"] == list(reserve.prompt)


async def test_tools_are_counted_as_the_chat_that_offers_them_has_them(site: Site) -> None:
    decode, _ = await site.system.pair()
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    found = await ask(site, "/tokenize", {**CHAT, "tools": tools})
    await ask(site, "/v1/chat/completions", {**CHAT, "tools": tools, "max_tokens": 2})
    reserve = decode.of(Reserve)[0]
    assert isinstance(reserve, Reserve)
    assert found["tokens"] == list(reserve.prompt)
    assert "weather" in site.text_of(found["tokens"])


async def test_special_tokens_are_added_to_prompts_and_left_to_the_template_of_chats(site: Site) -> None:
    with_bos = (await ask(site, "/tokenize", {"prompt": "the end"}))["tokens"]
    without = (await ask(site, "/tokenize", {"prompt": "the end", "add_special_tokens": False}))["tokens"]
    assert with_bos == [site.tokenizer.encode("")[0], *without]
    chat = (await ask(site, "/tokenize", CHAT))["tokens"]
    twice = (await ask(site, "/tokenize", {**CHAT, "add_special_tokens": True}))["tokens"]
    assert twice == [with_bos[0], *chat]


async def test_the_generation_prompt_and_the_template_s_arguments_can_be_chosen(site: Site) -> None:
    whole = await ask(site, "/tokenize", {**CHAT, "chat_template_kwargs": {"shout": True}})
    bare = await ask(site, "/tokenize", {**CHAT, "add_generation_prompt": False})
    assert site.text_of(whole["tokens"]) == "<|user|>helloLOUD<|assistant|>"
    assert site.text_of(bare["tokens"]) == "<|user|>hello"


async def test_token_strings_name_every_token(site: Site) -> None:
    found = await ask(site, "/tokenize", {"prompt": "the end", "return_token_strs": True})
    assert len(found["token_strs"]) == found["count"]
    assert found["token_strs"][0] == "<s>"
    assert "".join(found["token_strs"][1:]) == "the\u0120end"  # a space, as byte-level vocabularies write it


async def test_detokenize_undoes_tokenize_and_shows_special_tokens(site: Site) -> None:
    tokens = (await ask(site, "/tokenize", {"model": MODEL, "prompt": TEXT}))["tokens"]
    assert await ask(site, "/detokenize", {"model": MODEL, "tokens": tokens}) == {"prompt": "<s>" + TEXT}
    assert await ask(site, "/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": MODEL}, 400, "prompt"),
        ("/tokenize", {**CHAT, "prompt": "x"}, 400, "messages"),
        ("/tokenize", {"prompt": [1, 2]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "model": "nope"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
        ("/tokenize", {"messages": [{"role": "user", "content": "forbidden"}]}, 400, "messages"),
        ("/tokenize", {**CHAT, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs.tokenize"),
        ("/tokenize", {"prompt": "x", "kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ("/tokenize", {**CHAT, "tool_choice": "required"}, 400, "tool_choice"),
        ("/tokenize", {"prompt": "x", "model": 3}, 400, "model"),
        ("/detokenize", {"model": MODEL}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [500]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, "2"]}, 400, "tokens.1"),
        ("/detokenize", {"tokens": "12"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "nope"}, 404, "model"),
    ],
)
async def test_what_is_wrong_is_named(site: Site, path: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = await site.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert "x-request-id" in answer.headers


async def test_other_methods_and_types_are_refused(site: Site) -> None:
    assert (await site.client.get("/tokenize")).status_code == 405
    refused = await site.client.post("/detokenize", content=b"{}", headers={"content-type": "text/plain"})
    assert refused.status_code == 415
    assert "Content-Type: application/json" in refused.json()["error"]["message"]


async def test_the_event_loop_goes_on_while_a_text_is_tokenised(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(site.tokenizer, "encode", lambda text, **_: [1] if go_on.wait(10) else [])
    asked = asyncio.create_task(ask(site, "/tokenize", {"prompt": "x"}))
    assert (await site.client.get("/health")).status_code == 200
    assert not asked.done()
    go_on.set()
    assert (await asked)["tokens"] == [1]


async def test_one_is_at_work_at_a_time_and_few_wait() -> None:
    turns, at_work, most = Turns(max_waiting=2), 0, 0

    async def work() -> None:
        nonlocal at_work, most
        async with turns.turn():
            at_work += 1
            most = max(most, at_work)
            await asyncio.sleep(0)
            at_work -= 1

    done = await asyncio.gather(*(work() for _ in range(5)), return_exceptions=True)
    refused = [error for error in done if isinstance(error, ApiError)]
    assert most == 1
    assert [error.status for error in refused] == [503] * 2
    await work()  # and the place is free again
