"""Generated requests, valid and not, from a description of the API: every answer is one that the description allows.

The description is what the gateway itself serves at /openapi.json. Another one, such as OpenAI's own (not part of this
repository), is taken with `OPENAI_SPEC=path make clients`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pdserve.gateway.api import answers
from pdserve.gateway.api.description import OPERATIONS
from tests.system.harness import System
from tests.system.tiny_model import write_tiny_llama

pytestmark = pytest.mark.timeout(1200, method="signal")

MODEL = "tiny"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = {GenerationMode.POSITIVE: 200, GenerationMode.NEGATIVE: 100}
MAX_MODEL_LEN = 256
TIMEOUT_S = 60.0
SPEC_VARIABLE = "OPENAI_SPEC"
OPENAI_OPERATIONS = ("post /chat/completions", "post /completions", "get /models", "get /models/{model}")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A model of random weights and short context, so that every answer comes at once."""
    model = write_tiny_llama(tmp_path_factory.mktemp("models") / MODEL, seed=7, num_layers=2, hidden_size=32)
    flags = (
        "--max-model-len",
        MAX_MODEL_LEN,
        "--local-prefill",
        "never",
        "--kv-blocks",
        2048,
        "--prefill-kv-blocks",
        64,
    )
    with System(model, *flags) as running:
        yield running


def name_the_model(case: schemathesis.Case) -> None:
    """Anything else than the served name would be a 404, and the rest of the request would not be looked at."""
    if isinstance(case.body, dict):
        case.body["model"] = MODEL
    name = case.operation.path.rpartition("models/{")[2].removesuffix("}")
    if name in case.path_parameters:
        case.path_parameters[name] = MODEL


def streams_conform(text: str, label: str) -> None:
    """What a schema of server-sent events cannot say: every event is a chunk, or the last one an error."""
    chunk = next(
        o.chunk
        for o in OPERATIONS
        if o.path.removeprefix("/v1") == label.split()[1].removeprefix("/v1") and o.chunk is not None
    )
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    *chunks, last = events
    for event in chunks:
        chunk.model_validate_json(event, strict=True)
    if last != "[DONE]":
        answers.ErrorAnswer.model_validate_json(last, strict=True)


def hammer(document: dict[str, Any], label: str, mode: GenerationMode, base_url: str) -> dict[int, int]:
    """Send what is generated for one operation. Returns how many answers there were, by status code."""
    schema = schemathesis.openapi.from_dict(document)
    method, path = label.lower().split()
    operation = schema[path][method]
    counts: dict[int, int] = {}
    streams: list[str] = []

    @settings(
        max_examples=EXAMPLES[mode], deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(mode), stream=st.booleans())
    def holds(case: schemathesis.Case, stream: bool) -> None:
        name_the_model(case)
        if stream and path.endswith("completions") and isinstance(case.body, dict):
            case.body["stream"] = True
        response = case.call_and_validate(base_url, session, checks=CHECKS, timeout=TIMEOUT_S)
        if response.headers["content-type"][0].startswith("text/event-stream"):
            # Schemathesis leaves after the first events; read it all.
            streams.append(session.send(response.request, timeout=TIMEOUT_S).content.decode())
            streams_conform(streams[-1], label)
        counts[response.status_code] = counts.get(response.status_code, 0) + 1

    with requests.Session() as session:
        session.trust_env = False
        holds()
    assert streams or mode is GenerationMode.NEGATIVE or not path.endswith("completions"), "nothing was streamed"
    return counts


def assert_served(counts: dict[int, int], label: str, mode: GenerationMode) -> None:
    """Not all valid requests can be served (prompts may be too long), but many are; those that are not valid are not,
    but for what no schema of ours cares about."""
    print(f"{label}, {mode.value}: {counts}")
    if mode is GenerationMode.POSITIVE and label.endswith("completions"):
        assert counts.get(200, 0) > 10, f"hardly any request was served: {counts}"


def own_cases() -> list[tuple[str, GenerationMode]]:
    """Every operation, and wrong bodies for each one that takes a body: little is wrong with a path."""
    label = "{0.method} {0.path}".format
    valid = [(label(operation), GenerationMode.POSITIVE) for operation in OPERATIONS]
    return valid + [(label(operation), GenerationMode.NEGATIVE) for operation in OPERATIONS if operation.request]


@pytest.mark.parametrize(("label", "mode"), own_cases())
def test_answers_conform_to_the_description_that_is_served(system: System, label: str, mode: GenerationMode) -> None:
    counts = hammer(system.client.get("/openapi.json").json(), label, mode, system.url)
    assert_served(counts, label, mode)
    system.assert_idle(2.0)


@pytest.fixture(scope="module")
def other_description() -> dict[str, Any]:
    path = os.environ.get(SPEC_VARIABLE)
    if path is None:
        pytest.skip(f"{SPEC_VARIABLE} names no other description of the API")
    document: dict[str, Any] = json.loads(Path(path).read_text())
    for operations in document["paths"].values():
        for operation in operations.values():  # the events are checked by `streams_conform`
            operation["responses"]["200"]["content"].pop("text/event-stream", None)
            if "requestBody" in operation:
                operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return document


@pytest.mark.parametrize(
    ("label", "mode"),
    [(label, mode) for label in OPENAI_OPERATIONS for mode in EXAMPLES if label.startswith("post") or mode.is_positive],
)
def test_answers_conform_to_another_description(
    system: System, other_description: dict[str, Any], label: str, mode: GenerationMode
) -> None:
    counts = hammer(other_description, label, mode, f"{system.url}/v1")
    assert_served(counts, label, mode)
    system.assert_idle(2.0)
