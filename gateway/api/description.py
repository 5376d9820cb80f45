"""The OpenAPI document of the HTTP surface, served at /openapi.json: requests from the schemas that validate them,
answers from `answers.py`.

What a schema cannot say is not in it: that prompt and output must fit into the context, for one, which is a 400.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, RootModel
from pydantic.json_schema import models_json_schema

from . import answers
from .openai_api import ChatRequest, CompletionRequest
from .tokenizing import DetokenizeRequest, TokenizeChat, TokenizePrompt

REF = "#/components/schemas/{model}"
ERRORS = {
    400: "The request is wrong: `param` names the field.",
    401: "The API key is missing or unknown.",
    403: "Only for operators.",
    404: "There is no such model, worker or path.",
    405: "Another method is needed.",
    408: "The request came too slowly.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full, or the client's limit is reached: `Retry-After` says when to come back.",
    500: "A fault of the server's own.",
    503: "Nobody can serve it now: `Retry-After` says when to come back.",
    504: "It took longer than the server lets a request take.",
}
ANYWHERE = (400, 401, 500, 503)
WITH_BODY = (*ANYWHERE, 404, 408, 413, 415, 429)
GENERATE = (*WITH_BODY, 504)
OPERATOR = (*WITH_BODY, 403)
STREAM = "Server-sent events: each `data:` line is a {chunk}, the last `[DONE]`, or an ErrorAnswer."
# Pydantic leaves its own words where a bound stands behind a function.
JSON_SCHEMA_WORDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


class Weights(RootModel[dict[str, int]]):
    """Model → its share."""


@dataclass(frozen=True)
class Operation:
    """One method of one path. A body may be one of several schemas; an answer without one is text."""

    method: str
    path: str
    summary: str
    errors: tuple[int, ...]
    answer: type[BaseModel] | None
    request: tuple[type[BaseModel], ...] = ()
    chunk: type[BaseModel] | None = None
    status: int = 200
    query: tuple[str, ...] = ()

    @property
    def models(self) -> list[type[BaseModel]]:
        return [model for model in (*self.request, self.answer, self.chunk) if model is not None]


CHAT = Operation("post", "/v1/chat/completions", "Answer a chat", GENERATE, answers.ChatAnswer, (ChatRequest,))
COMPLETION = Operation(
    "post", "/v1/completions", "Continue texts", GENERATE, answers.CompletionAnswer, (CompletionRequest,)
)
TOKENIZE = Operation("post", "/tokenize", "The tokens of a prompt", WITH_BODY, answers.TokenizeAnswer)
WEIGH = Operation("post", "/admin/aliases/{name}", "Set an alias's weights", OPERATOR, answers.AliasWeights)

OPERATIONS = (
    replace(CHAT, chunk=answers.ChatChunk),
    replace(COMPLETION, chunk=answers.CompletionChunk),
    replace(TOKENIZE, request=(TokenizePrompt, TokenizeChat)),
    Operation("post", "/detokenize", "The text of tokens", WITH_BODY, answers.DetokenizeAnswer, (DetokenizeRequest,)),
    Operation("get", "/v1/models", "Models and aliases", ANYWHERE, answers.ModelList),
    Operation("get", "/v1/models/{name}", "One model or alias", (*ANYWHERE, 404), answers.ModelCard),
    Operation("get", "/health", "Does the process live?", ANYWHERE, answers.Health),
    Operation("get", "/ready", "Can it serve (this model)?", (*ANYWHERE, 404), answers.Ready, query=("model",)),
    Operation("get", "/version", "Which version is it?", ANYWHERE, answers.Version),
    Operation("get", "/openapi.json", "This document", ANYWHERE, answers.Document),
    Operation("get", "/metrics", "Metrics, for Prometheus", ANYWHERE, None),
    Operation("get", "/pools", "Workers and links", ANYWHERE, answers.Pools),
    Operation("post", "/admin/drain/{name}", "Have a worker leave", OPERATOR, answers.Drained, status=202),
    replace(WEIGH, request=(Weights,)),
)


def describe_api(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    requests = {model for operation in OPERATIONS for model in operation.request}
    others = {model for operation in OPERATIONS for model in operation.models} - requests | {answers.ErrorAnswer}
    by_name = sorted(requests, key=_name), sorted(others, key=_name)
    _, taken = models_json_schema([(model, "validation") for model in by_name[0]], ref_template=REF)
    _, given = models_json_schema([(model, "serialization") for model in by_name[1]], ref_template=REF)
    schemas = _in_words_of_json_schema(taken["$defs"])
    for model in requests:
        _let_optional_members_be_null(schemas[model.__name__])
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": version},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, **given["$defs"]},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "Where API keys are on."}},
        },
    }


def _name(model: type[BaseModel]) -> str:
    return model.__name__


def _in_words_of_json_schema(part: Any) -> Any:
    if isinstance(part, dict):
        return {JSON_SCHEMA_WORDS.get(key, key): _in_words_of_json_schema(value) for key, value in part.items()}
    return [_in_words_of_json_schema(item) for item in part] if isinstance(part, list) else part


def _let_optional_members_be_null(schema: dict[str, Any]) -> None:
    """Null means "not given" (`load_object`)."""
    for name, member in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and {"type": "null"} not in member.get("anyOf", ()):
            schema["properties"][name] = {"anyOf": [member, {"type": "null"}]}


def _schema(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}


def _describe(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "parameters": _parameters(operation)}
    if operation.request:
        schemas = [_schema(model) for model in operation.request]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {"application/json": {"schema": _schema(operation.answer)}}
    text = "Done."
    if operation.chunk is not None:
        text = STREAM.format(chunk=operation.chunk.__name__)
        content["text/event-stream"] = {}  # OpenAPI has no words for the events
    responses = {str(operation.status): {"description": text, "content": content}}
    refused = {"application/json": {"schema": _schema(answers.ErrorAnswer)}}
    responses |= {str(status): {"description": ERRORS[status], "content": refused} for status in operation.errors}
    return described | {"responses": responses}


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    text = {"type": "string"}
    in_path = [{"name": "name", "in": "path", "required": True, "schema": text}] if "{name}" in operation.path else []
    return in_path + [{"name": name, "in": "query", "schema": text} for name in operation.query]
