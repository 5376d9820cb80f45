"""Tools of a chat request: which may be called, how the template is told, and the grammar that makes it happen.

Under `required` the answer is, by grammar, an array of calls `{"name": …, "parameters": {…}}` (one such object when
parallel calls are off), under a named tool the arguments alone; `auto` leaves the model free. The deprecated
`functions` and `function_call` are the same thing under other names, with one call at most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...transfer.sampling_params import MAX_GRAMMAR_CHARS, Grammar
from .chat_output import Calling, ToolMode
from .errors import invalid
from .json_schema_shape import MAPS, first_malformed
from .openai_api import AllowedTools, ChatRequest, FunctionName, NamedFunction, NamedTool, ToolFunction
from .structured import BAD_GRAMMAR
from .tool_parsers import ToolParserName

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})  # of a schema: what stands there is no schema


def functions_of(request: ChatRequest) -> list[ToolFunction]:
    """What the client offers, each function once. Raises ApiError 400."""
    if request.tools and request.functions:
        raise invalid("functions: tools and functions exclude each other.", "functions")
    if request.tools:
        functions, path = [tool.function for tool in request.tools], "tools.{}.function.name"
    else:
        functions, path = request.functions or [], "functions.{}.name"
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            param = path.format(index)
            raise invalid(f"{param}: there is another function {function.name!r}.", param)
        seen.add(function.name)
    return functions


def calling_of(request: ChatRequest, functions: Sequence[ToolFunction], parser: ToolParserName) -> Calling | None:
    """Which calls may be made; None when there is nothing to call. Raises ApiError 400."""
    legacy = not request.tools and (bool(request.functions) or request.function_call is not None)
    field = "function_call" if legacy else "tool_choice"
    choice = request.function_call if legacy else request.tool_choice
    if choice == "none":
        return None
    if not functions:
        if choice is None:
            return None
        raise invalid(f"{field} needs {'functions' if legacy else 'tools'} to choose from.", field)
    offered = tuple(function.name for function in functions)
    mode: ToolMode = "auto"
    names = offered
    match choice:
        case "required":
            mode = "required"
        case NamedFunction(name=name):
            mode, names = "named", (_known(name, offered, "function_call.name"),)
        case NamedTool(function=NamedFunction(name=name)):
            mode, names = "named", (_known(name, offered, "tool_choice.function.name"),)
        case AllowedTools(allowed_tools=allowed):
            path = "tool_choice.allowed_tools.tools.{}.function.name"
            mode = allowed.mode
            names = tuple(
                _known(tool.function.name, offered, path.format(index)) for index, tool in enumerate(allowed.tools)
            )
    parallel = not legacy and request.parallel_tool_calls is not False
    return Calling(mode, names, parser, parallel and mode != "named", legacy)


def _known(name: FunctionName, offered: Sequence[str], param: str) -> str:
    if name not in offered:
        raise invalid(f"{param}: there is no function {name!r} among those that the request offers.", param)
    return name


def template_tools(functions: Sequence[ToolFunction]) -> list[dict[str, Any]]:
    """As chat templates expect them."""
    return [{"type": "function", "function": _described(function)} for function in functions]


def _described(function: ToolFunction) -> dict[str, Any]:
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = {"type": "object", "properties": {}} | (function.parameters or {})
    return described


# --- grammar ---------------------------------------------------------------------------------------------------------


def grammar_of(calling: Calling, functions: Sequence[ToolFunction]) -> Grammar | None:
    """What the answer must match, if anything. Raises ApiError 400 when that is too large."""
    if calling.mode == "auto":
        return None
    field = "functions" if calling.legacy else "tools"
    for index, function in enumerate(functions):
        if function.name in calling.names and (fault := first_malformed(function.parameters or NO_PARAMETERS)):
            param = f"{field}.{index}.parameters" if calling.legacy else f"{field}.{index}.function.parameters"
            raise invalid(f"{param}: {fault}", param, BAD_GRAMMAR)
    schemas = {function.name: function.parameters or NO_PARAMETERS for function in functions}
    if calling.mode == "named":
        schema: Mapping[str, Any] = schemas[calling.names[0]]
    else:
        schema = calls_schema({name: schemas[name] for name in calling.names}, array=calling.parallel)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # a number too large for a float
        raise invalid(f"{field}: {error}", field) from None
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid(f"{field}: the parameters' schemas have more than {MAX_GRAMMAR_CHARS} characters.", field)
    return Grammar("json_schema", text)


def calls_schema(schemas: Mapping[str, Mapping[str, Any]], *, array: bool) -> dict[str, Any]:
    """A schema of one call of any of these functions, or of an array of such calls."""
    call: dict[str, Any] = {"anyOf": [_call_schema(name) for name in schemas]}
    whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": call} if array else call
    return whole | {"$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()}}


def _call_schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    """The schema, with references to its own parts leading to where it now stands. Any: it is the client's JSON."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved_member(key, value, to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def _moved_member(keyword: str, value: Any, to: str) -> Any:
    if keyword in MAPS and isinstance(value, dict):  # its keys are the client's names, not keywords
        return {name: _moved(inner, to) for name, inner in value.items()}
    return value if keyword in DATA_KEYWORDS else _moved(value, to)
