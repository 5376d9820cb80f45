"""Instructor: objects of a class, by JSON schema and by tools."""

from __future__ import annotations

import instructor
import openai
import pytest

from tests.clients.conftest import KEY, MODEL, TIMEOUT_S, Served
from tests.clients.shapes import RIVER_QUESTION, River

pytestmark = pytest.mark.timeout(200, method="signal")

MODES = (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS)


@pytest.mark.parametrize("mode", MODES)
def test_answer_is_an_object_of_the_class_at_the_first_try(served: Served, mode: instructor.Mode) -> None:
    with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as plain:
        client = instructor.from_openai(plain, mode=mode)
        river = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": RIVER_QUESTION}],
            response_model=River,
            max_retries=0,
            temperature=1.0,
            seed=5,
        )
    assert isinstance(river, River)


@pytest.mark.parametrize("mode", MODES)
async def test_partial_objects_grow_into_the_whole_one(served: Served, mode: instructor.Mode) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as plain:
        client = instructor.from_openai(plain, mode=mode)
        stream = client.chat.completions.create_partial(
            model=MODEL,
            messages=[{"role": "user", "content": RIVER_QUESTION}],
            response_model=River,
            max_retries=0,
            temperature=0,
        )
        partial = [dict(river) async for river in stream]
    River.model_validate(partial[-1])
    assert any(earlier != partial[-1] for earlier in partial)
