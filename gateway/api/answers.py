"""What the HTTP surface answers, member by member: for its description at /openapi.json, and for tests to hold answers
against. Nothing here is at work while a request is served; the JSON itself is written by `responses.py` and others.

A member with a default may be missing. No answer has a member that is not here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorDetail


# --- usage and log probabilities -------------------------------------------------------------------------------------


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class UsageAnswer(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob] | None
    refusal: None


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]

# --- chat ------------------------------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class CalledFunction(Answer):
    name: str
    arguments: str


class MessageToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] = Field(default=[], min_length=1)
    function_call: CalledFunction | None = None


class ChatChoice(Answer):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None


class Reply(Answer):
    id: str
    created: int
    model: str


class ChatAnswer(Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class DeltaFunction(Answer):
    name: str | None = None
    arguments: str


class DeltaToolCall(Answer):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunction


class ChunkDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None
    function_call: DeltaFunction | None = None


class ChunkChoice(Answer):
    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None


class ChatChunk(Reply):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: UsageAnswer | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


# --- completions -----------------------------------------------------------------------------------------------------


class CompletionChunkChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChoice(CompletionChunkChoice):
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(Reply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer


class CompletionChunk(Reply):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: UsageAnswer | None = None


# --- the rest --------------------------------------------------------------------------------------------------------


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    prompt: str


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Health(Answer):
    status: Literal["ok"]


class Ready(Answer):
    status: Literal["ready"]
    models: list[str]


class Version(Answer):
    version: str


class Document(BaseModel):
    """OpenAPI's own schema says what else is in it."""

    openapi: str


class Pools(Answer):
    gateway: str
    control_address: str
    queued: int
    aliases: dict[str, dict[str, int]]
    workers: list[dict[str, Any]]


class Drained(Answer):
    worker: str
    state: str
    inflight: int


class AliasWeights(Answer):
    alias: str
    weights: dict[str, int]
