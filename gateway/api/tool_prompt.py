"""Tools for models whose chat template knows of none: told in the system message, in Hermes style.

system      what the client said, then INTRODUCTION with the functions
assistant   its calls as <tool_call>{"name": …, "arguments": {…}}</tool_call>
tool        as a user message, <tool_response>…</tool_response>; consecutive ones are one message
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

INTRODUCTION = """\
You can use functions to help the user. Each line between <tools> and </tools> describes one, in JSON:
<tools>
{tools}
</tools>
To call a function, answer with one JSON object between <tool_call> and </tool_call>, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"parameter": "value"}}}}
</tool_call>
You will be given its result between <tool_response> and </tool_response>."""

Messages = list[dict[str, Any]]  # Any: what chat templates are given


def with_tools_in_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, system: bool
) -> Messages:
    """The messages with the tools, the calls and their results as text. `system`: the template takes system messages;
    without, the first user message begins with the introduction. No tools: only the history is put into words."""
    told = [_told(message) for message in messages]
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        _introduce(told, INTRODUCTION.format(tools=lines), "system" if system else "user")
    return _joined_results(told)


def _introduce(messages: Messages, introduction: str, role: str) -> None:
    if role == "system" and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": introduction})
        return
    for index, message in enumerate(messages):
        if message["role"] == role:
            parts = [message["content"], introduction] if role == "system" else [introduction, message["content"]]
            messages[index] = message | {"content": "\n\n".join(filter(None, parts))}
            return
    messages.insert(0, {"role": role, "content": introduction})


def _told(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "tool", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [_call_text(call["function"]) for call in message["tool_calls"]]
    return rest | {"content": "\n".join(filter(None, [message["content"], *calls]))}


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _joined_results(messages: Messages) -> Messages:
    joined: Messages = []
    in_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and in_results:
            joined[-1]["content"] += "\n" + message["content"]
        else:
            joined.append({"role": "user", "content": message["content"]} if is_result else message)
        in_results = is_result
    return joined
