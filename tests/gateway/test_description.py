"""/openapi.json describes all that is served, and what is served is as it says."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.gateway.api import answers
from pdserve.gateway.api.description import OPERATIONS, describe_api
from pdserve.gateway.api.text import Tokenizer
from tests.gateway.fake_worker import MODEL
from tests.gateway.site import Site, running_site

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def site(tmp_path: Path, model_dir: Path, model_text: Tokenizer) -> AsyncIterator[Site]:
    async with running_site(tmp_path, model_dir, model_text) as site:
        yield site


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a document."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(inner)


def test_every_reference_leads_somewhere_and_every_bound_is_json_schema() -> None:
    document = describe_api("1.2.3")
    assert document["info"]["version"] == "1.2.3"
    referred = {part["$ref"] for part in parts(document) if isinstance(part.get("$ref"), str)}
    assert referred == {f"#/components/schemas/{name}" for name in document["components"]["schemas"]} - {
        f"#/components/schemas/{name}" for name in ("ChatChunk", "CompletionChunk")
    }
    n = document["components"]["schemas"]["ChatRequest"]["properties"]["n"]
    assert n["anyOf"][0] | {"title": "", "default": 1} == {
        "type": "integer", "minimum": 1, "maximum": 128, "title": "", "default": 1,
    }  # fmt: skip
    assert {"type": "null"} in n["anyOf"]
    assert not [part for part in parts(document) if {"ge", "le", "gt", "lt"} & part.keys()]


def test_what_is_refused_whatever_it_says_is_not_described() -> None:
    properties = describe_api("")["components"]["schemas"]["ChatRequest"]["properties"]
    assert "messages" in properties
    assert "audio" not in properties


def test_every_route_is_described_and_nothing_else() -> None:
    source = (ROOT / "gateway" / "app.py").read_text() + (ROOT / "gateway" / "admin.py").read_text()
    routes = re.findall(r'Route\("([^"]+)"', source)
    assert len(routes) > 12
    served = {path.replace(":path", "") for path in routes} - {"/debug/requests"}
    assert served == {operation.path for operation in OPERATIONS}


async def test_plain_endpoints_answer_as_described(site: Site) -> None:
    await site.system.pair()
    for operation in OPERATIONS:
        if operation.method == "get" and operation.answer is not None:
            response = await site.client.get(operation.path.replace("{name}", MODEL))
            assert response.status_code == operation.status, operation.path
            operation.answer.model_validate_json(response.text, strict=True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_generated_answers_and_streams_are_as_described(site: Site, path: str) -> None:
    await site.system.pair()
    (operation,) = (operation for operation in OPERATIONS if operation.path == path)
    assert operation.answer is not None
    assert operation.chunk is not None
    body = {"model": MODEL, "max_tokens": 4, "return_token_ids": True}
    body |= {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": [1, 2, 3]}
    whole = await site.client.post(path, json=body)
    operation.answer.model_validate_json(whole.text, strict=True)
    streamed = await site.client.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    *chunks, done = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert done == "[DONE]"
    assert len(chunks) > 4
    for chunk in chunks:
        operation.chunk.model_validate_json(chunk, strict=True)
    refused = await site.client.post(path, json=body | {"n": 0})
    answers.ErrorAnswer.model_validate_json(refused.text, strict=True)
