"""The bodies of /tokenize and /detokenize: what a client counts with is what its requests are made of.

Both functions take as long as the text is long: run them off the event loop.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from .chat_request import parse_chat_request
from .errors import invalid, model_not_found
from .json_body import load_object
from .openai_api import ChatRequest, Flag, Int
from .parsed_request import ModelLimits
from .parsing import check_tokens, validated
from .text import Tokenizer


class TokenizePrompt(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    model: str = ""
    prompt: str
    add_special_tokens: Flag = True
    return_token_strs: Flag = False


class TokenizeChat(ChatRequest):
    """A whole request for a chat may be sent; what concerns the prompt counts, the tools among it."""

    model: str = ""
    add_special_tokens: Flag = False  # the template writes them
    return_token_strs: Flag = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    model: str = ""
    tokens: list[Int]


def tokenize(body: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> bytes:
    """POST /tokenize. Raises ApiError."""
    fields = load_object(body)
    _check_model(fields, limits)
    if "prompt" in fields and "messages" in fields:
        raise invalid("prompt and messages exclude each other.", "messages")
    if "prompt" not in fields and "messages" not in fields:
        raise invalid("prompt: Field required (or messages).", "prompt")
    request: TokenizePrompt | TokenizeChat
    if "messages" in fields:
        request = validated(TokenizeChat, fields)
        tokens = parse_chat_request(request, tokenizer, add_special_tokens=request.add_special_tokens).prompt
    else:
        request = validated(TokenizePrompt, fields)
        tokens = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": limits.max_model_len, "tokens": tokens}
    answer["token_strs"] = tokenizer.token_strings(tokens) if request.return_token_strs else None
    return json.dumps(answer).encode()


def detokenize(body: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> bytes:
    """POST /detokenize: special tokens are shown. Raises ApiError."""
    fields = load_object(body)
    _check_model(fields, limits)
    request = validated(DetokenizeRequest, fields)
    check_tokens(request.tokens, tokenizer, "tokens")
    return json.dumps({"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}).encode()


def _check_model(fields: dict[str, Any], limits: ModelLimits) -> None:
    """It may be left out; then it is the first one."""
    name = fields.get("model", limits.names[0])
    if isinstance(name, str) and name not in limits.names:
        raise model_not_found(name)
