"""Which parts of a JSON schema can be enforced while text is generated.

An answer under a strict schema must validate, so a schema with a part that would silently count for nothing is refused
with the name of that part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .json_schema_shape import LISTS, MAPS, SINGLE
from .regex import misread_in

NEVER = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
# One of these says it all: what stands beside it is passed over.
WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
BY_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties",
    ),
}  # fmt: skip
CONSTRAINTS = frozenset(("type", *WHOLE, *(keyword for group in BY_TYPE.values() for keyword in group)))
FREE_FORMATS = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})  # not of the compiler's
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def first_unenforced(schema: dict[str, Any]) -> str:
    """The first part of a well-formed schema that could not be enforced, with its place and the reason; "" if there is
    none."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        path, part = waiting.pop(0)
        if not isinstance(part, dict):
            continue  # true, false, or what the compiler refuses
        for fault in _faults(part, schema):
            return f"{path.lstrip('.') or 'the schema'}: {fault}"
        for keyword in MAPS:
            if isinstance(inner := part.get(keyword), dict):
                waiting += [(f"{path}.{keyword}.{name}", value) for name, value in inner.items()]
        for keyword in LISTS:
            if isinstance(inner := part.get(keyword), list):
                waiting += [(f"{path}.{keyword}.{number}", value) for number, value in enumerate(inner)]
        waiting += [(f"{path}.{keyword}", part[keyword]) for keyword in SINGLE if keyword in part]
    return ""


def _faults(part: dict[str, Any], root: dict[str, Any]) -> Iterator[str]:
    """What of one schema, its inner ones apart, cannot be enforced."""
    for keyword in NEVER:
        if keyword in part:
            yield f"{keyword} cannot be enforced"
    whole = [keyword for keyword in WHOLE if keyword in part]
    if whole:
        yield from _beside(part, whole[0])
        yield from _combination_faults(part, root)
        return
    kind = part.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    for name, keywords in BY_TYPE.items():
        present = [keyword for keyword in keywords if keyword in part]
        if present and kind is None and name in ("string", "number"):
            yield f"{present[0]} cannot be enforced without a type beside it"
    if "number" in kinds or "integer" in kinds:
        yield from _number_faults(part, kinds)
    yield from _string_faults(part)
    yield from _container_faults(part)


def _beside(part: dict[str, Any], whole: str) -> Iterator[str]:
    """Constraints next to one that stands for everything."""
    for keyword in part:
        if keyword in CONSTRAINTS and keyword != whole and not (keyword == "type" and whole in ("const", "enum")):
            yield f"{keyword} cannot be enforced beside {whole}"
    if whole in ("const", "enum") and "type" in part:
        kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
        values = [part["const"]] if whole == "const" else part["enum"]
        for value in values if isinstance(values, list) else ():
            if not any(_has_type(value, kind) for kind in kinds):
                yield f"{whole} holds a value that is not of type {part['type']}"


def _has_type(value: object, kind: object) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(kind, str) and isinstance(value, PYTHON_TYPES.get(kind, ()))


def _combination_faults(part: dict[str, Any], root: dict[str, Any]) -> Iterator[str]:
    reference = part.get("$ref", "#")
    if reference != "#" and not (isinstance(reference, str) and reference.startswith("#/")):
        yield "$ref can only point into the same schema"
    if len(part.get("allOf") or [0]) > 1:
        yield "allOf of more than one schema cannot be enforced"
    branches = part.get("oneOf")
    if isinstance(branches, list) and not _exclude_each_other([_resolved(branch, root) for branch in branches]):
        yield "oneOf can only be enforced when its schemas differ in their type, or in a required const; use anyOf"


def _resolved(part: Any, root: dict[str, Any]) -> Any:
    """What a local $ref stands for."""
    for _ in range(8):
        if not isinstance(part, dict) or not str(part.get("$ref", "")).startswith("#/"):
            return part
        target: Any = root
        for step in part["$ref"][2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        part = target
    return None


def _exclude_each_other(branches: list[Any]) -> bool:
    """Can no value match two of them, as far as is seen at a glance?"""
    if not all(isinstance(branch, dict) for branch in branches):
        return False
    kinds = [branch.get("type") for branch in branches]
    kinds = ["number" if kind == "integer" else kind for kind in kinds]
    if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
        return True
    marks = [_marks(branch) for branch in branches]
    return any(
        all(name in mark for mark in marks) and len({mark[name] for mark in marks}) == len(marks)
        for name in (marks[0] if marks else ())
    )


def _marks(branch: dict[str, Any]) -> dict[str, str]:
    """Required properties that can have one value only: name → that value's text."""
    properties, required = branch.get("properties"), branch.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    found = {}
    for name, part in properties.items():
        values = [part["const"]] if isinstance(part, dict) and "const" in part else []
        if isinstance(part, dict) and isinstance(part.get("enum"), list):
            values = part["enum"]
        if name in required and len(values) == 1 and isinstance(values[0], str):
            found[name] = values[0]
    return found


def _number_faults(part: dict[str, Any], kinds: list[Any]) -> Iterator[str]:
    bounded = any(keyword in part for keyword in BY_TYPE["number"] if keyword != "multipleOf")
    if "multipleOf" in part and ("number" in kinds or bounded):
        yield "multipleOf can only be enforced for integers without bounds"


def _string_faults(part: dict[str, Any]) -> Iterator[str]:
    lengths = "minLength" in part or "maxLength" in part
    if lengths and ("pattern" in part or "format" in part):
        yield "minLength and maxLength cannot be enforced beside pattern or format"
    if "pattern" in part and "format" in part:
        yield "pattern cannot be enforced beside format"
    if part.get("format") in FREE_FORMATS:
        yield f"format {part['format']} cannot be enforced"
    if fault := misread_in(part.get("pattern", "")):
        yield f"pattern cannot be enforced: {fault}"


def _container_faults(part: dict[str, Any]) -> Iterator[str]:
    if part.get("uniqueItems") is True:
        yield "uniqueItems cannot be enforced"
    if isinstance(part.get("items"), list):
        yield "items must be one schema; use prefixItems for several"
    properties = part.get("properties") or {}
    for name in part.get("required") or ():
        if name not in properties:
            yield f"required names {name!r:.100}, which properties does not define"
    others = "patternProperties" in part or "propertyNames" in part
    if others and (properties or len(part.get("patternProperties") or {}) > 1 or "additionalProperties" in part):
        yield "patternProperties and propertyNames cannot be enforced beside other properties"
    for pattern in part.get("patternProperties") or {}:
        if fault := misread_in(pattern):
            yield f"patternProperties cannot be enforced: {fault}"
    if "minProperties" in part and (others or part.get("additionalProperties") not in (None, False)):
        yield "minProperties can only be enforced for properties that are named"
