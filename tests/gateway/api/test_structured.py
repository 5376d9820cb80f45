"""`response_format`, `guided_*` and `structured_outputs`: which grammar they mean, and what is refused by name."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.api.json_schema import first_unenforced
from pdserve.gateway.api.json_schema_shape import first_malformed
from pdserve.gateway.api.parsed_request import ModelLimits
from pdserve.gateway.api.parsing import parse_chat, parse_completion
from pdserve.gateway.api.structured import choice_grammar
from pdserve.gateway.api.text import Tokenizer
from pdserve.transfer.sampling_params import MAX_GRAMMAR_CHARS, Grammar
from tests.schemas import random_schema

LIMITS = ModelLimits(names=("demo",), max_model_len=256, pool_tokens=200)
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
SCHEMA_TEXT = json.dumps(SCHEMA)


def json_format(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", **fields}}}


def parse(tokenizer: Tokenizer, fields: dict[str, Any], *, chat: bool = True) -> tuple[Grammar | None, str]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    body = json.dumps({"model": "demo", **prompt, **fields}).encode()
    request = (parse_chat if chat else parse_completion)(body, tokenizer, LIMITS)
    return request.params[0].grammar, request.grammar_field


@pytest.mark.parametrize(
    ("fields", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json", "", "response_format"),
        (json_format(schema=SCHEMA), "json_schema", SCHEMA_TEXT, "response_format.json_schema.schema"),
        (json_format(schema=SCHEMA, strict=True), "json_schema", SCHEMA_TEXT, "response_format.json_schema.schema"),
        (json_format(), "json", "", "response_format.json_schema.schema"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA_TEXT, "guided_json"),
        ({"guided_json": SCHEMA_TEXT}, "json_schema", SCHEMA_TEXT, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"', "guided_grammar"),
        ({"guided_choice": ["yes", "no"]}, "ebnf", 'root ::= "yes" | "no"', "guided_choice"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA_TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "ebnf", 'root ::= "a"', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "ebnf", "root ::= x", "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json", "", "structured_outputs.json_object"),
    ],
)
def test_every_way_of_asking_becomes_one_grammar_on_both_endpoints(
    tokenizer: Tokenizer, fields: dict[str, Any], kind: Any, text: str, field: str
) -> None:
    for chat in (True, False):
        assert parse(tokenizer, fields, chat=chat) == (Grammar(kind, text), field)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "choice": None}, "guided_json": None},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_no_grammar(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    assert parse(tokenizer, fields) == (None, "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
         "response_format.json_schema.name"),
        (json_format(schema=[1]), "response_format.json_schema.schema"),
        (json_format(name="a b"), "response_format.json_schema.name"),
        ({"guided_json": 5}, "guided_json"), ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"), ({"guided_json": '{"const": NaN}'}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"), ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex"),
        ({"guided_choice": "yes"}, "guided_choice"), ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice.1"),
        ({"guided_choice": ["é" * 1000] * 60}, "guided_choice"),
        ({"guided_json": {"enum": ["a" * MAX_GRAMMAR_CHARS]}}, "guided_json"),
        (json_format(schema=SCHEMA, strict="yes"), "response_format.json_schema.strict"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a^b"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a$b"}}, "structured_outputs.regex"),
        ({"guided_json": {"type": "string", "pattern": r"\Aa"}}, "guided_json"),
        ({"guided_json": {"type": "object", "patternProperties": {r"[\^]": {}}}}, "guided_json"),
        ({"guided_grammar": {}}, "guided_grammar"), ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        (json_format(schema={"not": {}}, strict=True), "response_format.json_schema.schema"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_grammar_is_refused_by_its_field(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    for chat in (True, False):
        with pytest.raises(ApiError) as caught:
            parse(tokenizer, fields, chat=chat)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert len(caught.value.message) < 600


KEYWORDS = [
    "type", "enum", "required", "items", "$ref", "pattern", "format", "minimum", "maximum", "multipleOf", "minLength",
    "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "properties", "patternProperties", "$defs",
    "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties", "propertyNames", "const", "default", "title",
]  # fmt: skip
ODD: list[Any] = [
    None, True, 0, -1, 1.5, 10**30, "", "x", [], {}, [None], [1], [[]], [{}], ["a", {}], {"a": None}, {"a": 1},
    {"a": []}, {"$ref": 1}, {"$ref": "#/a/0"}, {"type": {}}, [{"type": [[]]}], {"a": {"enum": 1}}, [{"required": 1}],
]  # fmt: skip


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_no_value_of_any_keyword_is_anything_but_a_grammar_or_refused(tokenizer: Tokenizer, keyword: str) -> None:
    for value in ODD:
        for beside in ({}, {"type": "object", "properties": {"a": {"enum": [{}]}}, "required": ["a"]}):
            schema = beside | {keyword: value}
            for whole in (schema, {"items": schema}, {"oneOf": [schema, {"type": "string"}]}):
                for strict in (True, False):
                    with suppress(ApiError):
                        parse(tokenizer, json_format(schema=whole, strict=strict))


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"required": 1}, "required must be a list of strings"), ({"required": [[]]}, "required must be"),
        ({"type": "strin"}, "type must be one of array,"), ({"type": []}, "type must be"),
        ({"properties": {"a": {"maxLength": -1}}}, "properties.a.maxLength must be an integer from 0 on"),
        ({"items": [{"anyOf": []}]}, "items.0.anyOf must be a list of at least one schema"),
        ({"$defs": {"a": {"allOf": 1}}}, "$defs.a.allOf must be"), ({"enum": []}, "enum must be"),
        ({"additionalProperties": 1}, "additionalProperties must be a schema"),
    ],
)  # fmt: skip
def test_a_keyword_whose_value_cannot_be_is_named_strict_or_not(
    tokenizer: Tokenizer, schema: dict[str, Any], fault: str
) -> None:
    for fields in (json_format(schema=schema), json_format(schema=schema, strict=True), {"guided_json": schema}):
        with pytest.raises(ApiError, match=re.escape(fault)):
            parse(tokenizer, fields)


def test_names_and_data_are_no_keywords() -> None:
    for schema in (
        {"properties": {"type": {"const": 1}, "required": True}},
        {"const": {"type": 7}},
        {"enum": [{"$ref": 1}]},
    ):
        assert first_malformed(schema) == ""


def test_only_a_schema_that_is_not_strict_may_hold_what_cannot_be_enforced(tokenizer: Tokenizer) -> None:
    grammar, _ = parse(tokenizer, json_format(schema={"type": "integer", "not": {"const": 3}}))
    assert grammar == Grammar("json_schema", '{"type": "integer", "not": {"const": 3}}')


def test_choices_are_quoted_so_that_nothing_in_them_is_syntax() -> None:
    assert choice_grammar(['a"b', "\\n", "\n", "é", "x | y"]) == (
        'root ::= "a\\U00000022b" | "\\U0000005Cn" | "\\U0000000A" | "\\U000000E9" | "x | y"'
    )


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"properties": {"a": {"type": "array", "contains": {}}}}, "properties.a: contains cannot be enforced"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "beside pattern"),
        ({"type": "string", "pattern": "a^b"}, "pattern cannot be enforced: position 1"),
        ({"type": "string", "format": "iri"}, "format iri cannot"),
        ({"type": "object", "patternProperties": {"a$b": True}}, "patternProperties cannot be enforced: position 2"),
        ({"$ref": "#/$defs/x", "minimum": 3}, "minimum cannot be enforced beside $ref"),
        ({"$ref": "http://x/y"}, "$ref can only point"), ({"minimum": 3}, "without a type"),
        ({"type": "string", "enum": ["a", 1]}, "not of type string"), ({"type": "boolean", "const": 1}, "not of type"),
        ({"type": "number", "multipleOf": 2}, "multipleOf"), ({"required": ["a"]}, "required names 'a'"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "minProperties"),
        ({"anyOf": [{"type": "string"}, {"not": {}}]}, "anyOf.1: not cannot"),
    ],
)  # fmt: skip
def test_a_part_that_would_count_for_nothing_is_named(schema: dict[str, Any], fault: str) -> None:
    assert fault in first_unenforced(schema)


@pytest.mark.parametrize(
    "schema",
    [
        *map(random_schema, range(100)),
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {"enum": ["not"]}}},  # names, not keywords
        {"oneOf": [{"type": "string"}, {"type": "null"}], "title": "T", "description": "d", "$defs": {}},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
            name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in "ab"}},
        {"type": "integer", "multipleOf": 5}, {"type": "string", "enum": ["a"]},
        {"type": ["integer", "null"], "minimum": 2},
    ],
)  # fmt: skip
def test_a_schema_that_can_be_enforced_has_no_fault(schema: dict[str, Any]) -> None:
    assert first_unenforced(schema) == ""
