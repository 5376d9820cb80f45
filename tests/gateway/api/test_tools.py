"""Tools in requests: what is refused, what the model is told, and the grammar of required calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.gateway.api.chat_output import Calling, ChatStyle
from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.api.parsed_request import ModelLimits, ParsedRequest
from pdserve.gateway.api.parsing import parse_chat
from pdserve.gateway.api.text import Tokenizer
from pdserve.gateway.api.tools import calls_schema
from pdserve.gateway.reply import Reply

LIMITS = ModelLimits(names=("demo",), max_model_len=5000, pool_tokens=5000)
HELLO = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "says it", "parameters": CITY}
TIME = {"name": "time"}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, TIME)]

QWEN_LIKE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }})"
    "{% endfor %}"
    "{% if m.role == 'tool' %}[{{ m.name }} {{ m.tool_call_id }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% elif reasoning_effort %}<think>\n{% endif %}{% endif %}"
)
STRINGS_LIKE = QWEN_LIKE.replace("c.function.arguments | tojson", "'' + c.function.arguments")
NO_SYSTEM_LIKE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
)

Chat = Callable[..., ParsedRequest]


@pytest.fixture(scope="session")
def templated(tokenizer_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """The byte-level tokenizer with another template."""

    def make(template: str, *style: Any) -> Tokenizer:
        path = tmp_path_factory.mktemp("templated") / "m"
        shutil.copytree(tokenizer_dirs["byte_level"], path)
        (path / "chat_template.jinja").write_text(template)
        return Tokenizer(path, style=ChatStyle(*style))

    return make


def chat_with(tokenizer: Tokenizer) -> Chat:
    def chat(**fields: Any) -> ParsedRequest:
        body = {"model": "demo", "messages": HELLO} | fields
        return parse_chat(json.dumps(body).encode(), tokenizer, LIMITS)

    return chat


@pytest.fixture
def chat(tokenizer: Tokenizer) -> Chat:
    """The template knows of no tools."""
    return chat_with(tokenizer)


@pytest.fixture(scope="session")
def qwen(templated: Callable[..., Tokenizer]) -> Tokenizer:
    return templated(QWEN_LIKE)


def prompt(request: ParsedRequest, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(request.prompts[0], skip_special_tokens=False)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


# --- which calls may be made ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "calling"),
    [
        ({}, None),
        ({"tools": TOOLS}, Calling("auto", ("weather", "time"))),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": TOOLS, "parallel_tool_calls": False}, Calling("auto", ("weather", "time"), parallel=False)),
        ({"tools": TOOLS, "tool_choice": "required"}, Calling("required", ("weather", "time"))),
        ({"tools": TOOLS, "tool_choice": named("time")}, Calling("named", ("time",), parallel=False)),
        ({"tools": TOOLS, "tool_choice": allowed("required", "time")}, Calling("required", ("time",))),
        ({"functions": [WEATHER]}, Calling("auto", ("weather",), parallel=False, legacy=True)),
        (
            {"functions": [WEATHER], "function_call": {"name": "weather"}},
            Calling("named", ("weather",), parallel=False, legacy=True),
        ),
        ({"functions": [WEATHER], "function_call": "none"}, None),
    ],
)  # fmt: skip
def test_the_fields_say_which_calls_may_be_made(chat: Chat, fields: dict[str, Any], calling: Calling | None) -> None:
    assert chat(**fields).output.calling == calling


def tool(name: object, **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **members}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"), ({"tools": [7]}, "tools.0"), ({"tools": [{"function": TIME}]}, "tools.0.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [tool("")]}, "tools.0.function.name"), ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("a" * 65)]}, "tools.0.function.name"), ({"tools": [tool("é")]}, "tools.0.function.name"),
        ({"tools": [tool("f\n")]}, "tools.0.function.name"), ({"tools": [tool(5)]}, "tools.0.function.name"),
        ({"tools": [tool("f", parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [tool("f", strict="yes")]}, "tools.0.function.strict"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools.2.function.name"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"), ({"tools": TOOLS, "tool_choice": 1}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": named("rm")}, "tool_choice.function.name"),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto", "time", "rm")},
            "tool_choice.allowed_tools.tools.1.function.name",
        ),
        ({"tool_choice": "auto"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("f")}, "tool_choice"), ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "a b"}]}, "functions.0.name"), ({"function_call": "auto"}, "function_call"),
        ({"functions": [TIME, TIME]}, "functions.1.name"), ({"functions": [TIME], "tools": TOOLS}, "functions"),
        ({"functions": [TIME], "function_call": {"name": "rm"}}, "function_call.name"),
        ({"functions": [TIME], "function_call": "required"}, "function_call"),
        ({"tools": [tool("f", parameters={"const": "x" * 300_000})], "tool_choice": named("f")}, "tools"),
        (
            {"tools": [tool("g"), tool("f", parameters={"required": 1})], "tool_choice": "required"},
            "tools.1.function.parameters",
        ),
        ({"functions": [{"name": "f", "parameters": {"properties": []}}], "function_call": {"name": "f"}},
         "functions.0.parameters"),
        ({"verbosity": "loud"}, "verbosity"), ({"metadata": {"a": 1}}, "metadata.a"), ({"store": 1}, "store"),
        ({"service_tier": 1}, "service_tier"), ({"user": 1}, "user"), ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(chat: Chat, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert len(refused.value.message) < 600


def test_fields_without_a_meaning_here_are_accepted(chat: Chat) -> None:
    chat(
        verbosity="low", metadata={"a": "b"}, store=True, service_tier="auto", user="u", prompt_cache_key="k",
        safety_identifier="s", reasoning_effort="high", parallel_tool_calls=True,
    )  # fmt: skip


# --- what the model is told -------------------------------------------------------------------------------------


def test_a_template_that_knows_tools_is_given_them(qwen: Tokenizer) -> None:
    text = prompt(chat_with(qwen)(tools=TOOLS), qwen)
    shown = {"name": "time", "parameters": {"type": "object", "properties": {}}}
    assert json.dumps({"type": "function", "function": shown}) in text
    assert "says it" in text
    assert text.endswith("<tool_call><|user|>hello<|assistant|>")
    assert "tools" not in prompt(chat_with(qwen)(tools=TOOLS, tool_choice="none"), qwen)


def test_a_template_that_knows_none_tells_them_in_the_system_message(chat: Chat, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    text = prompt(chat(messages=messages, tools=TOOLS), tokenizer)
    assert text.startswith("<s><|system|>Be brief.\n\nYou can use functions")
    assert '"name": "weather"' in text
    assert text.endswith("</s><|user|>hello</s><|assistant|>")
    assert prompt(chat(tools=TOOLS), tokenizer).startswith("<s><|system|>You can use functions")
    assert prompt(chat(tools=TOOLS, tool_choice="none"), tokenizer) == prompt(chat(), tokenizer)


def test_a_template_without_system_messages_tells_them_in_the_first_user_message(
    templated: Callable[..., Tokenizer],
) -> None:
    tokenizer = templated(NO_SYSTEM_LIKE)
    text = prompt(chat_with(tokenizer)(tools=TOOLS), tokenizer)
    assert text.startswith("<|user|>You can use functions")
    assert text.endswith("\n\nhello")


HISTORY = [
    *HELLO,
    {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "é"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
    {"role": "function", "name": "weather", "content": "rain"},
]  # fmt: skip


def test_earlier_calls_and_results_reach_the_template_as_objects(qwen: Tokenizer) -> None:
    text = prompt(chat_with(qwen)(messages=HISTORY), qwen)
    assert text == (
        '<|user|>hello<|assistant|>(time {"zone": "é"} c1)<|tool|>noon[time c1]'
        "<|assistant|>(weather {} call00003)<|tool|>rain[weather call00003]<|assistant|>"
    )


def test_a_template_that_wants_arguments_as_text_gets_them_so(templated: Callable[..., Tokenizer]) -> None:
    tokenizer = templated(STRINGS_LIKE)
    assert '(time {"zone": "é"} c1)' in prompt(chat_with(tokenizer)(messages=HISTORY), tokenizer)


def test_earlier_calls_and_results_are_put_into_words_where_the_template_cannot(
    chat: Chat, tokenizer: Tokenizer
) -> None:
    text = prompt(chat(messages=HISTORY), tokenizer)
    assert (
        '<|assistant|><tool_call>\n{"name": "time", "arguments": {"zone": "é"}}\n</tool_call></s>'
        "<|user|><tool_response>\nnoon\n</tool_response></s>"
    ) in text


def test_the_parser_is_the_flags_or_the_templates(templated: Callable[..., Tokenizer], tokenizer: Tokenizer) -> None:
    def parser(tokenizer: Tokenizer) -> str:
        calling = chat_with(tokenizer)(tools=TOOLS).output.calling
        assert calling is not None
        return calling.parser

    assert parser(templated(QWEN_LIKE)) == "hermes"
    assert parser(templated(QWEN_LIKE.replace("<tool_call>", "[TOOL_CALLS]"))) == "mistral"
    assert parser(templated(QWEN_LIKE, "llama3_json")) == "llama3_json"
    assert parser(tokenizer) == "hermes", "the style of what we tell it ourselves"


# --- reasoning --------------------------------------------------------------------------------------------------


def test_reasoning_effort_reaches_the_template_and_the_prompt_says_whether_reasoning_is_open(
    templated: Callable[..., Tokenizer], qwen: Tokenizer
) -> None:
    chat = chat_with(templated(QWEN_LIKE, "auto", "think"))
    assert chat().output.reasoning == "maybe"
    assert chat(reasoning_effort="high").output.reasoning == "yes"
    assert chat(reasoning_effort="none").output.reasoning == "no"
    assert chat_with(qwen)(reasoning_effort="high").output.reasoning is None


def test_markers_that_are_special_tokens_are_seen_and_other_special_tokens_are_not(
    tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(str(tokenizer_dirs["byte_level"]))
    hf.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "<think>", "</think>", "<pad>"]})
    hf.chat_template = QWEN_LIKE.replace("<tool_call>", "[TOOL_CALLS]")
    hf.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path, style=ChatStyle(reasoning_parser="think"))
    ids = tokenizer.encode('<think>why</think><pad>so[TOOL_CALLS][{"name": "time"}]</s>')[1:]
    reply = Reply(chat_with(tokenizer)(tools=TOOLS), tokenizer)
    for token in ids:
        reply.token(0, token, "stop" if token == ids[-1] else "", None)
    (choice,) = json.loads(reply.body())["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", "so")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["time"]
    assert len(message["tool_calls"][0]["id"]) == 9
    plain = Reply(chat_with(Tokenizer(tmp_path))(), tokenizer)
    for token in ids:
        plain.token(0, token, "stop" if token == ids[-1] else "", None)
    assert json.loads(plain.body())["choices"][0]["message"]["content"] == 'whyso[{"name": "time"}]'


# --- grammar ----------------------------------------------------------------------------------------------------


def grammar(request: ParsedRequest) -> Any:
    (params,) = request.params
    assert params.grammar is not None
    assert params.grammar.kind == "json_schema"
    return json.loads(params.grammar.text)


def test_a_named_call_is_its_arguments(chat: Chat) -> None:
    assert grammar(chat(tools=TOOLS, tool_choice=named("weather"))) == WEATHER["parameters"]
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert grammar(chat(tools=TOOLS, tool_choice=named("time"))) == nothing
    assert chat(tools=TOOLS).params[0].grammar is None


def test_an_answer_that_must_call_cannot_be_guided_otherwise(chat: Chat) -> None:
    with pytest.raises(ApiError) as caught:
        chat(tools=TOOLS, tool_choice="required", guided_regex="a")
    assert (caught.value.status, caught.value.param) == (400, "guided_regex")
    assert chat(tools=TOOLS, tool_choice="required").grammar_field == "tools"
    assert chat(tools=TOOLS, guided_regex="a").grammar_field == "guided_regex"


def test_required_calls_are_an_array_or_a_single_object(chat: Chat) -> None:
    many = grammar(chat(tools=TOOLS, tool_choice="required"))
    assert (many["type"], many["minItems"]) == ("array", 1)
    one = grammar(chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False))
    assert one["anyOf"] == many["items"]["anyOf"]
    assert [call["properties"]["name"]["const"] for call in one["anyOf"]] == ["weather", "time"]
    assert one["$defs"]["weather"] == WEATHER["parameters"]


def test_where_the_model_reasons_the_grammar_is_about_what_follows(
    tokenizer_dirs: dict[str, Path], tmp_path: Path, templated: Callable[..., Tokenizer]
) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(str(tokenizer_dirs["byte_level"]))
    hf.add_tokens(["<think>", "</think>"])
    hf.chat_template = QWEN_LIKE
    hf.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path, style=ChatStyle(reasoning_parser="think"))
    begin, end = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    for effort, after, opening in (("high", end, None), (None, end, begin), ("none", None, None)):
        for fields in ({"tools": TOOLS, "tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
            (params,) = chat_with(tokenizer)(reasoning_effort=effort, **fields).params
            assert params.grammar is not None
            assert (params.grammar.after, params.grammar.opening) == (after, opening)
    without = chat_with(templated(QWEN_LIKE, "auto", "think"))
    assert without(tools=TOOLS, tool_choice="required").params[0].grammar.after is None  # type: ignore[union-attr]
    with pytest.raises(ApiError, match="no single token") as refused:
        without(reasoning_effort="high", tools=TOOLS, tool_choice="required")
    assert (refused.value.status, refused.value.param) == (400, "tools")


def test_a_required_format_beside_tools_is_refused_unless_the_answer_is_a_call(chat: Chat) -> None:
    form = {"type": "json_object"}
    with pytest.raises(ApiError) as refused:
        chat(tools=TOOLS, response_format=form)
    assert refused.value.param == "response_format"
    assert grammar(chat(tools=TOOLS, tool_choice="required", response_format=form))["type"] == "array"
    assert chat(tools=TOOLS, tool_choice="none", response_format=form).params[0].grammar is not None


def test_references_within_parameters_still_lead_to_their_own_parts() -> None:
    tree = {
        "type": "object",
        "$defs": {"leaf": {"type": "string", "default": {"$ref": "#"}}},
        "properties": {"$ref": {"$ref": "#/$defs/leaf"}, "more": {"type": "array", "items": {"$ref": "#"}}},
    }
    moved = calls_schema({"tree": tree}, array=False)["$defs"]["tree"]
    assert moved["properties"]["$ref"] == {"$ref": "#/$defs/tree/$defs/leaf"}
    assert moved["properties"]["more"]["items"] == {"$ref": "#/$defs/tree"}
    assert moved["$defs"]["leaf"]["default"] == {"$ref": "#"}


@pytest.mark.parametrize("name", ["default", "enum", "const", "examples"])
def test_references_in_a_parameter_that_is_named_like_a_keyword_lead_there_too(name: str) -> None:
    schema = {"properties": {name: {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}}
    moved = calls_schema({"f": schema}, array=True)["$defs"]["f"]
    assert moved["properties"][name] == {"$ref": "#/$defs/f/$defs/x"}
