"""Messages of a chat request → what a chat template is given: text only, roles checked, names kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import ApiError, invalid
from .json_body import BadJson, load_json
from .openai_api import ChatMessage, ContentPart, FunctionCall
from .text import Tokenizer
from .tool_prompt import with_tools_in_text


def template_messages(
    messages: Sequence[ChatMessage], tokenizer: Tokenizer, tools: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """What the chat template is given; where it knows of no tools, they are in the text.

    Raises ApiError 400 naming the member ("messages.0.content.1.type").
    """
    result = []
    called = ""  # id of the latest deprecated `function_call`: its result comes without one
    names: dict[str, str] = {}  # of the functions called so far, by the call's id
    for index, message in enumerate(messages):
        templated = _template_message(message, f"messages.{index}", tokenizer)
        if message.function_call is not None:
            called = f"call{index:05}"  # nine letters and digits, as Mistral's templates want it
            templated["tool_calls"] = [_template_tool_call(called, message.function_call, tokenizer)]
        if message.role == "function":
            templated |= {"role": "tool", "tool_call_id": called or f"call{index:05}"}
        names.update({call["id"]: call["function"]["name"] for call in templated.get("tool_calls", ())})
        if templated["role"] == "tool" and (name := names.get(templated["tool_call_id"])):
            templated.setdefault("name", name)
        result.append(templated)
    if tokenizer.template.tools:
        return result
    return with_tools_in_text(result, tools, system=tokenizer.template.system)


def _template_message(message: ChatMessage, path: str, tokenizer: Tokenizer) -> dict[str, Any]:
    _check_role(message, path)
    role: str = message.role
    if role == "developer" and not tokenizer.knows_role("developer"):
        role = "system"  # the same thing under the name that most templates know
    result: dict[str, Any] = {"role": role, "content": message_text(message, path)}
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    result.update({name: value for name, value in optional.items() if value is not None})
    if message.tool_calls:
        result["tool_calls"] = [_template_tool_call(call.id, call.function, tokenizer) for call in message.tool_calls]
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


def message_text(message: ChatMessage, path: str) -> str:
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


def _template_tool_call(call_id: str, function: FunctionCall, tokenizer: Tokenizer) -> dict[str, Any]:
    """Clients send the arguments as a string of JSON; most templates walk them as an object."""
    arguments: Any = function.arguments
    if tokenizer.template.argument_objects:
        try:
            parsed = load_json(function.arguments)
        except BadJson:
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
    return {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": arguments}}
