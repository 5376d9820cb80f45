"""Messages of a chat request → what a chat template is given: text only, roles checked, names kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .errors import ApiError, invalid
from .openai_api import ChatMessage, ContentPart, ToolCall
from .text import Tokenizer


def template_messages(messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One dict per message. Raises ApiError 400 naming the member ("messages.0.content.1.type")."""
    return [_template_message(message, f"messages.{i}", tokenizer) for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, path: str, tokenizer: Tokenizer) -> dict[str, Any]:
    _check_role(message, path)
    role: str = message.role
    if role == "developer" and not tokenizer.knows_role("developer"):
        role = "system"  # the same thing under the name that most templates know
    result: dict[str, Any] = {"role": role, "content": _text(message, path)}
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    result.update({name: value for name, value in optional.items() if value is not None})
    if message.tool_calls:
        result["tool_calls"] = [_template_tool_call(call) for call in message.tool_calls]
    return result


def _check_role(message: ChatMessage, path: str) -> None:
    """What each role must carry."""
    if message.role == "tool" and message.tool_call_id is None:
        raise _missing(f"{path}.tool_call_id", "a tool message")
    if message.role == "function" and message.name is None:
        raise _missing(f"{path}.name", "a function message")
    if message.content is None:
        calls = message.tool_calls or message.function_call or message.refusal is not None
        if message.role != "function" and not (message.role == "assistant" and calls):
            raise _missing(f"{path}.content", f"this {message.role} message")


def _missing(param: str, who: str) -> ApiError:
    return invalid(f"{param}: {who} needs it.", param)


def _text(message: ChatMessage, path: str) -> str:
    """Parts are joined as they are, with nothing between them. A refusal is what the assistant said."""
    if message.content is None:
        return message.refusal or ""
    if isinstance(message.content, str):
        return message.content
    return "".join(_part_text(part, f"{path}.content.{i}") for i, part in enumerate(message.content))


def _part_text(part: ContentPart, path: str) -> str:
    match part.type:
        case "text":
            text = part.text
        case "refusal":
            text = part.refusal
        case other:
            raise invalid(f"{path}.type: content of type {other!r:.60} is not taken by this model.", f"{path}.type")
    if text is None:
        raise _missing(f"{path}.{part.type}", f"a {part.type} part")
    return text


def _template_tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates walk the arguments as an object, clients send them as a string of JSON."""
    arguments: Any = call.function.arguments
    try:
        parsed = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
