"""Is a JSON schema one? Keywords whose values are of the wrong kind are found here, before anything follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})

MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == value // 1


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


_Rule = tuple[Callable[[Any], bool], str]
_RULES: dict[str, _Rule] = {
    "type": (_is_type, f"one of {', '.join(sorted(TYPES))}, or a list of them"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of at least one value"),
    "required": (_are_names, "a list of strings"),
    "items": (lambda value: _is_schema(value) or (isinstance(value, list) and all(map(_is_schema, value))), "a schema"),
    **dict.fromkeys(("$ref", "pattern", "format"), (_is_text, "a string")),
    **dict.fromkeys(("minimum", "maximum"), (_is_number, "a number")),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "an integer from 0 on"),
    ),
    **dict.fromkeys(
        MAPS, (lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())), "an object of schemas")
    ),
    **dict.fromkeys(LISTS, (_are_schemas, "a list of at least one schema")),
    **dict.fromkeys(SINGLE[1:], (_is_schema, "a schema")),
}


def first_malformed(schema: dict[str, Any]) -> str:
    """The first keyword whose value cannot be, with its place and what it should be; "" if there is none."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        path, part = waiting.pop()
        for keyword, value in part.items():
            if keyword not in _RULES:
                continue
            fits, wanted = _RULES[keyword]
            if not fits(value):
                return f"{path}{keyword} must be {wanted}"
            where = f"{path}{keyword}."
            if keyword in MAPS:
                inner = [(f"{where}{name}.", one) for name, one in value.items()]
            elif isinstance(value, list) and (keyword in LISTS or keyword == "items"):
                inner = [(f"{where}{number}.", one) for number, one in enumerate(value)]
            else:
                inner = [(where, value)] if keyword in SINGLE else []
            waiting += [(place, one) for place, one in inner if isinstance(one, dict)]
    return ""
