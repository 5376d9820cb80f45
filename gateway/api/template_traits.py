"""What a chat template can do, found out by having it render small conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PROBE = "zq_probe_qz"  # a word that no template has of its own
USER = {"role": "user", "content": "hello"}
TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "d",
        "parameters": {"type": "object", "properties": {"p": {"type": "string", "description": "d"}}},
    },
}

Messages = list[dict[str, Any]]  # Any: the shapes are the templates'
Render = Callable[[Messages, list[dict[str, Any]] | None], str | None]
"""Text of messages and tools; None when the template refuses them."""


@dataclass(frozen=True)
class TemplateTraits:
    """`tools`: it shows tools to the model. `argument_objects`: of calls made before it wants the arguments as an
    object, not as a string of JSON. `system`: it takes system messages."""

    tools: bool
    argument_objects: bool
    system: bool


def template_traits(render: Render) -> TemplateTraits:
    return TemplateTraits(
        tools=PROBE in (render([USER], [TOOL]) or ""),
        argument_objects=_takes_objects(render),
        system=PROBE in (render([{"role": "system", "content": PROBE}, USER], None) or ""),
    )


def _takes_objects(render: Render) -> bool:
    """With an object, does JSON come out? (Python's spelling of one has single quotes.)"""
    call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {"p": PROBE}}}
    answered: Messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "name": "f", "tool_call_id": "000000000"},
    ]
    text = render(answered, [TOOL])
    return text is not None and (f'"{PROBE}"' in text or f"'{PROBE}'" not in text)
