"""What the text of an answer must look like, as clients say it: `response_format`, `guided_*`, `structured_outputs`.

At most one of them may ask for something, and it becomes one `Grammar`. Only what is cheap is checked here; a worker
compiles it, and what it says against it comes back as a 400 that names the same field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, Strict, StringConstraints
from pydantic_core import PydanticCustomError

from ...transfer.sampling_params import MAX_GRAMMAR_CHARS, Grammar
from .errors import invalid, not_supported
from .json_body import BadJson, load_json
from .json_schema import first_unenforced
from .json_schema_shape import first_malformed
from .regex import misread_in

BAD_GRAMMAR = "bad_grammar"

GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[list[GrammarText], Field(min_length=1, max_length=4096)]


def _schema_or_text(value: object) -> object:
    if not isinstance(value, (dict, str)):
        raise PydanticCustomError("schema_type", "Input should be an object or a string")
    return value


Schema = Annotated[Any, BeforeValidator(_schema_or_text)]
OptionalSchema = Schema | None


class JsonSchemaFormat(BaseModel):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: Annotated[bool, Strict()] | None = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """The `guided_*` fields under one roof."""

    json_schema: OptionalSchema = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: Annotated[bool, Strict()] | None = None
    structural_tag: Any = None  # refused


class StructuredFields(BaseModel):
    """What both endpoints take."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: OptionalSchema = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None


def grammar_of(request: StructuredFields) -> tuple[Grammar | None, str]:
    """The grammar that is asked for, and the field that asks for it ("" for none). Raises ApiError."""
    asked = list(_asked(request))
    if not asked:
        return None, ""
    (field, kind, value), *others = asked
    if others:
        raise invalid(f"{others[0][0]}: there is {field} already, and only one of them may be given.", others[0][0])
    return _grammar(field, kind, value), field


def _asked(request: StructuredFields) -> Iterator[tuple[str, str, Any]]:
    """(field, what it holds, value) of everything that asks for something."""
    if (form := request.response_format) is not None and form.type != "text":
        if form.type == "json_object":
            yield "response_format", "json", None
        elif form.json_schema is None:
            raise invalid("response_format.json_schema: Field required", "response_format.json_schema")
        else:
            kind = "strict schema" if form.json_schema.strict else "schema"
            yield "response_format.json_schema.schema", kind, form.json_schema.json_schema
    guided = request.structured_outputs or StructuredOutputs.model_validate({})
    if guided.structural_tag is not None:
        raise not_supported("structured_outputs.structural_tag")
    for field, kind, value in (
        ("guided_json", "strict schema", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "choice", request.guided_choice),
        ("guided_grammar", "ebnf", request.guided_grammar),
        ("structured_outputs.json", "strict schema", guided.json_schema),
        ("structured_outputs.regex", "regex", guided.regex),
        ("structured_outputs.choice", "choice", guided.choice),
        ("structured_outputs.grammar", "ebnf", guided.grammar),
    ):
        if value is not None:
            yield field, kind, value
    if guided.json_object:
        yield "structured_outputs.json_object", "json", None


def _grammar(field: str, kind: str, value: Any) -> Grammar:
    match kind:
        case "regex":
            if fault := misread_in(value):
                raise invalid(f"{field}: {fault}", field, BAD_GRAMMAR)
            return Grammar("regex", value)
        case "ebnf":
            return Grammar("ebnf", value)
        case "choice":
            return Grammar("ebnf", _fitting(field, choice_grammar(value)))
        case "json":
            return Grammar("json", "")
        case _:
            if value is None:  # a name alone
                return Grammar("json", "")
            return schema_grammar(field, value, strict=kind == "strict schema")


def schema_grammar(field: str, schema: dict[str, Any] | str, *, strict: bool) -> Grammar:
    """A JSON schema as a grammar. `strict`: refuse what cannot be enforced, rather than pass over it. Raises ApiError
    naming `field`."""
    if isinstance(schema, str):
        try:
            parsed = load_json(schema)
        except BadJson as error:
            raise invalid(f"{field}: {error.path or 'the schema'} {error}", field) from None
        if not isinstance(parsed, dict):
            raise invalid(f"{field}: the schema must be an object", field)
        schema = parsed
    if fault := first_malformed(schema) or (first_unenforced(schema) if strict else ""):
        raise invalid(f"{field}: {fault}", field, BAD_GRAMMAR)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # a number too large for a float
        raise invalid(f"{field}: {error}", field) from None
    return Grammar("json_schema", _fitting(field, text))


def _fitting(field: str, text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid(f"{field}: {len(text)} characters are more than {MAX_GRAMMAR_CHARS}.", field)
    return text


def choice_grammar(choices: list[str]) -> str:
    """EBNF of exactly these texts."""
    return "root ::= " + " | ".join(_literal(text) for text in choices)


def _literal(text: str) -> str:
    """An EBNF string: everything but plain characters is escaped."""

    def escape(char: str) -> str:
        if char.isascii() and char.isprintable() and char not in '"\\':
            return char
        return f"\\U{ord(char):08X}"

    return '"' + "".join(map(escape, text)) + '"'
