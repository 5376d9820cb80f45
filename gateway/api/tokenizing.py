"""The bodies of /tokenize and /detokenize: what a client counts with is what its requests are made of.

Both functions take as long as the text is long: run them off the event loop.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from .chat_messages import template_messages
from .errors import invalid, model_not_found
from .openai_api import ChatMessage, Flag, Int
from .parsed_request import ModelLimits
from .parsing import check_tokens, validate
from .text import Tokenizer


class TokenizeRequest(BaseModel):
    """`prompt` or `messages`. Special tokens are added to a prompt, and left to the template of a chat, unless
    `add_special_tokens` says otherwise."""

    model_config = ConfigDict(protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: Flag = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    model: str | None = None
    tokens: list[Int]


def tokenize(body: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> bytes:
    """POST /tokenize. Raises ApiError."""
    request = validate(TokenizeRequest, body)
    _check_model(request.model, limits)
    tokens = _encode(request, tokenizer)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": limits.max_model_len, "tokens": tokens}
    answer["token_strs"] = tokenizer.token_strings(tokens) if request.return_token_strs else None
    return json.dumps(answer).encode()


def _encode(request: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    if request.prompt is not None and request.messages is not None:
        raise invalid("prompt and messages exclude each other.", "messages")
    if request.prompt is not None:
        return tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    if request.messages is None:
        raise invalid("prompt: Field required (or messages).", "prompt")
    if request.continue_final_message and request.add_generation_prompt:
        raise invalid("add_generation_prompt and continue_final_message exclude each other.", "continue_final_message")
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not request.continue_final_message
    return tokenizer.encode_chat(
        template_messages(request.messages, tokenizer),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=request.chat_template_kwargs,
        add_special_tokens=bool(request.add_special_tokens),
    )


def detokenize(body: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> bytes:
    """POST /detokenize: special tokens are shown. Raises ApiError."""
    request = validate(DetokenizeRequest, body)
    _check_model(request.model, limits)
    check_tokens(request.tokens, tokenizer, "tokens")
    return json.dumps({"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}).encode()


def _check_model(name: str | None, limits: ModelLimits) -> None:
    if name is not None and name not in limits.names:
        raise model_not_found(name)
