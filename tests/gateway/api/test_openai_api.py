"""Request bodies: what is accepted and what it means, what is refused and how the refusal names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.api.parsed_request import ModelLimits, ParsedRequest
from pdserve.gateway.api.parsing import parse_chat, parse_completion
from pdserve.gateway.api.text import TextOptions, Tokenizer

LIMITS = ModelLimits(names=("demo", "alias"), max_model_len=256, pool_tokens=200)
HELLO = [{"role": "user", "content": "hello"}]

Parse = Callable[..., ParsedRequest]
Refuse = Callable[..., ApiError]


def encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


@pytest.fixture
def chat(tokenizer: Tokenizer) -> Parse:
    return lambda **fields: parse_chat(encode({"model": "demo", "messages": HELLO} | fields), tokenizer, LIMITS)


@pytest.fixture
def completion(tokenizer: Tokenizer) -> Parse:
    return lambda **fields: parse_completion(encode({"model": "demo", "prompt": "hello"} | fields), tokenizer, LIMITS)


def refused(parse: Parse, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    error = caught.value
    assert error.status == 400
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    json.dumps(error.body())
    return error


# --- defaults and meanings ------------------------------------------------------------------------------------


def test_defaults_are_openais(chat: Parse, tokenizer: Tokenizer) -> None:
    request = chat()
    (params,) = request.params
    assert request.prompts == (tuple(tokenizer.encode_chat(HELLO)),)
    assert (request.n, request.stream, request.echo_texts, request.text) == (1, False, (), TextOptions())
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)


def test_without_max_tokens_a_chat_may_fill_the_context_and_the_pool(tokenizer: Tokenizer) -> None:
    prompt = len(tokenizer.encode_chat(HELLO))
    for limits in (ModelLimits(("demo",), 256, 200), ModelLimits(("demo",), 200, 256)):
        request = parse_chat(encode({"model": "demo", "messages": HELLO}), tokenizer, limits)
        assert request.params[0].max_tokens == 200 - prompt


def test_without_max_tokens_a_completion_has_16_or_what_is_left(completion: Parse) -> None:
    request = completion(prompt=[[5] * 10, [5] * 195])
    assert [params.max_tokens for params in request.params] == [16, 5]


def test_max_completion_tokens_supersedes_max_tokens(chat: Parse) -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).params[0].max_tokens == 9
    assert refused(chat, max_tokens=5, max_completion_tokens=999).param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([5, 6], ((5, 6),)), ([[5, 6], [7]], ((5, 6), (7,))), ([5.0, 6], None)],
)
def test_token_prompts_are_taken_as_they_are(completion: Parse, prompt: Any, expected: Any) -> None:
    if expected is None:
        assert refused(completion, prompt=prompt).param == "prompt.0"
    else:
        assert completion(prompt=prompt).prompts == expected


def test_text_prompts_are_encoded_each_on_its_own(completion: Parse, tokenizer: Tokenizer) -> None:
    assert completion(prompt="the end").prompts == (tuple(tokenizer.encode("the end")),)
    both = completion(prompt=["the end", "of"], n=3)
    assert both.prompts == (tuple(tokenizer.encode("the end")), tuple(tokenizer.encode("of")))
    assert (both.num_choices, both.prompt_tokens) == (6, sum(map(len, both.prompts)))


def test_a_given_seed_is_kept_and_a_minted_one_differs_between_prompts(completion: Parse) -> None:
    given_seed = completion(prompt=["a", "a"], seed=-1)
    assert [params.seed for params in given_seed.params] == [2**64 - 1] * 2
    minted = completion(prompt=["a", "a"])
    assert minted.params[0].seed != minted.params[1].seed


def test_extensions_reach_the_sampler(completion: Parse) -> None:
    request = completion(
        top_k=7, min_p=0.1, repetition_penalty=1.3, min_tokens=2, ignore_eos=True, stop_token_ids=[3], priority=-5,
        cache_salt="s", logit_bias={"7": -100, "8": 1.5}, skip_special_tokens=False, return_token_ids=True,
        include_stop_str_in_output=True, stop=["x", "y", "x"], temperature=0, top_p=0,
    )  # fmt: skip
    (params,) = request.params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (7, 0.1, 1.3, 2)
    assert (params.ignore_eos, params.stop_token_ids, params.logit_bias) == (True, [3], {7: -100.0, 8: 1.5})
    assert params.temperature == 0
    assert 0 < params.top_p < 1e-5, "only the likeliest token is left"
    assert request.text == TextOptions(("x", "y"), include_stop=True, skip_special_tokens=False, min_tokens=2)
    assert (request.priority, request.cache_salt, request.return_token_ids) == (-5, "s", True)


@pytest.mark.parametrize("top_k", [-1, 0, 10**9, 10**30])
def test_top_k_that_bars_nothing_is_off(completion: Parse, top_k: int) -> None:
    assert completion(top_k=top_k).params[0].top_k == 0


def test_stop_may_be_one_string_or_none(chat: Parse) -> None:
    assert chat(stop="END").text.stop == ("END",)
    assert chat(stop=[]).text.stop == ()


def test_null_means_not_given(chat: Parse, completion: Parse) -> None:
    names = [
        "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty",
        "logit_bias", "seed", "stop", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "top_k",
        "min_p", "stop_token_ids", "max_completion_tokens", "chat_template_kwargs", "best_of", "suffix", "echo", "user",
    ]  # fmt: skip
    nulls = dict.fromkeys(names)
    assert chat(**nulls, seed_=0).text == chat().text
    assert completion(**nulls).params[0].max_tokens == 16
    assert chat(stream=True, stream_options={"include_usage": None}).include_usage is False


def test_values_that_ask_for_nothing_are_accepted(chat: Parse, completion: Parse) -> None:
    chat(
        logprobs=False, top_logprobs=0, tools=[], tool_choice="none", response_format={"type": "text"},
        modalities=["text"], functions=[], function_call="none",
    )  # fmt: skip
    completion(suffix="", best_of=2, n=2)


def test_what_is_asked_of_the_workers_covers_what_the_response_shows(chat: Parse, completion: Parse) -> None:
    def asked(request: ParsedRequest) -> tuple[int | None, int | None]:
        return request.params[0].logprobs, request.params[0].prompt_logprobs

    assert asked(chat()) == asked(chat(top_logprobs=0)) == (None, None)
    assert asked(chat(logprobs=True)) == (0, None)
    assert asked(chat(logprobs=True, top_logprobs=20, prompt_logprobs=3)) == (20, 3)
    assert asked(completion(logprobs=0)) == (0, None)
    assert asked(completion(echo=True)) == (None, None)
    assert asked(completion(logprobs=4, echo=True, prompt_logprobs=2)) == (4, 4)
    assert asked(completion(echo=True, prompt_logprobs=2)) == (None, 2)
    best = completion(best_of=3, n=2)
    assert asked(best) == (0, None)
    assert (best.logprobs, best.n, best.num_sampled) == (None, 2, 3)


def test_a_prompt_alone_may_fill_all_there_is(completion: Parse) -> None:
    request = completion(prompt=[5] * LIMITS.pool_tokens, max_tokens=0, echo=True, logprobs=1)
    assert request.params[0].max_tokens == 0
    assert refused(completion, prompt=[5] * (LIMITS.pool_tokens + 1), max_tokens=0, echo=True).param == "prompt"


def test_a_chats_echo_is_the_assistant_message_it_continues(chat: Parse) -> None:
    said = [*HELLO, {"role": "assistant", "content": "once"}]
    assert chat(messages=said, echo=True, continue_final_message=True).echo_texts == ("once",)
    assert chat(echo=True).echo_texts == ()


def test_unknown_fields_are_ignored(chat: Parse) -> None:
    chat(store=True, metadata={"a": "b"}, user="me", reasoning_effort="low", safety_identifier="x", foo=[{"bar": 1}])


def test_stream_options_say_where_usage_goes(chat: Parse) -> None:
    request = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (request.stream, request.include_usage, request.continuous_usage) == (True, True, True)


def test_echo_shows_the_prompt_as_it_was_given(completion: Parse, tokenizer: Tokenizer) -> None:
    assert completion(prompt=["the  end", "of"], echo=True).echo_texts == ("the  end", "of")
    ids = tokenizer.encode("the end")[1:]
    assert completion(prompt=ids, echo=True).echo_texts == ("the end",)


# --- messages -------------------------------------------------------------------------------------------------


def prompt_text(request: ParsedRequest, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(request.prompts[0], skip_special_tokens=False)


def test_text_parts_are_joined(chat: Parse) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompts == chat().prompts


def test_every_role_is_rendered(tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": "two", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "three", "tool_call_id": "1"},
        {"role": "function", "content": None, "name": "f"},
        {"role": "assistant", "refusal": "no"},
    ]
    wide = ModelLimits(("demo",), 1000, 1000)
    text = prompt_text(parse_chat(encode({"model": "demo", "messages": messages}), tokenizer, wide), tokenizer)
    assert text == (
        '<s><|system|>one</s><|user|>two</s><|assistant|><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call></s>'
        "<|user|><tool_response>\nthree\n</tool_response>\n<tool_response>\n\n</tool_response></s>"
        "<|assistant|>no</s><|assistant|>"
    )


def test_developer_is_system_where_the_template_does_not_know_it(chat: Parse, tokenizer: Tokenizer) -> None:
    assert "<|system|>hi" in prompt_text(chat(messages=[{"role": "developer", "content": "hi"}]), tokenizer)


def test_final_message_can_be_continued(chat: Parse, tokenizer: Tokenizer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "the"}]
    text = prompt_text(chat(messages=messages, continue_final_message=True), tokenizer)
    assert text.endswith("<|assistant|>the")
    assert prompt_text(chat(add_generation_prompt=False), tokenizer).endswith("hello</s>")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(chat, messages=messages, **both).param == "continue_final_message"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        ([7], "messages.0"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([*HELLO, {"role": "user"}], "messages.1.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 7}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": [7]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages.0.content.0.type"),
        ([{"role": "tool", "content": "x"}], "messages.0.tool_call_id"),
        ([{"role": "function", "content": "x"}], "messages.0.name"),
        ([{"role": "assistant"}], "messages.0.content"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls.0.function"),
        ([{"role": "user", "content": "forbidden"}], "messages"),
        ([{"role": "user", "content": "\ud800"}], "messages.0.content"),
    ],
)
def test_a_bad_message_is_named_by_its_path(chat: Parse, messages: Any, param: str) -> None:
    assert refused(chat, messages=messages).param == param


# --- limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "param", "text"),
    [
        (256, 1, "prompt", "max_model_len 256"),
        (300, None, "prompt", "max_model_len 256"),
        (200, None, "prompt", "pool_tokens 200"),
        (100, 157, "max_tokens", "max_model_len 256"),
        (100, 101, "max_tokens", "pool_tokens 200"),
        (1, 10**30, "max_tokens", "max_model_len 256"),
    ],
)
def test_too_long_names_the_limit(
    completion: Parse, prompt_tokens: int, max_tokens: int | None, param: str, text: str
) -> None:
    error = refused(completion, prompt=[5] * prompt_tokens, max_tokens=max_tokens)
    assert (error.param, error.code) == (param, "context_length_exceeded")
    assert text in error.message


def test_exactly_the_limit_fits(completion: Parse) -> None:
    assert completion(prompt=[5] * 100, max_tokens=100).params[0].max_tokens == 100


def test_a_long_chat_is_refused_by_its_messages(chat: Parse) -> None:
    assert refused(chat, messages=[{"role": "user", "content": "word " * 300}]).param == "messages"


def test_unknown_model_is_a_404(tokenizer: Tokenizer) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ApiError) as caught:
            parse(encode({"model": "gpt-4", "messages": HELLO, "prompt": "x"}), tokenizer, LIMITS)
        assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")


def test_any_served_name_is_accepted_and_echoed(chat: Parse) -> None:
    assert chat(model="alias").model == "alias"


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"), ({"temperature": 10**400}, "temperature"),
        ({"top_p": 1.1}, "top_p"), ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 1.5}, "n"), ({"n": True}, "n"),
        ({"n": "1"}, "n"), ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"), ({"stop": 5}, "stop"), ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": list("abcde")}, "stop"), ({"stop": "x" * 2000}, "stop"), ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"), ({"logit_bias": {"999999": 1}}, "logit_bias.999999"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"), ({"logit_bias": {"\u0665": 1}}, "logit_bias.\u0665"),
        ({"logit_bias": []}, "logit_bias"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias." + "9" * 40),
        ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"), ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 17, "max_tokens": 16}, "min_tokens"), ({"min_tokens": 10**30}, "min_tokens"),
        ({"stop_token_ids": [999999]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids.0"), ({"stream": "yes"}, "stream"), ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": 1}, "stream_options"), ({"priority": 2**40}, "priority"),
        ({"cache_salt": "x" * 257}, "cache_salt"), ({"model": 5}, "model"), ({"model": None}, "model"),
        ({"logprobs": "1"}, "logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"reservation": 1}, "reservation"), ({"attempt": None}, "attempt"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"bootstrap_host": "x"}, "bootstrap_host"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named_on_both_endpoints(
    chat: Parse, completion: Parse, fields: dict[str, Any], param: str
) -> None:
    for parse in (chat, completion):
        error = refused(parse, **fields)
        assert error.param == param
        assert len(error.message) < 600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"), ({"tool_choice": "auto"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"functions": [{}]}, "functions.0.name"),
        ({"modalities": ["audio"]}, "modalities"), ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)  # fmt: skip
def test_a_bad_chat_field_is_named(chat: Parse, fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt.1"), ({"prompt": [1, "a"]}, "prompt.1"), ({"prompt": [[1], "a"]}, "prompt.1"),
        ({"prompt": [True]}, "prompt.0"), ({"prompt": [999999]}, "prompt"), ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [10**400]]}, "prompt"), ({"prompt": ["a"] * 100, "n": 128}, "n"), ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "stream": True}, "best_of"), ({"logprobs": True}, "logprobs"), ({"logprobs": 6}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"), ({"best_of": 21}, "best_of"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"), ({"prompt": "a\udc00"}, "prompt"),
    ],
)  # fmt: skip
def test_a_bad_completion_field_is_named(completion: Parse, fields: dict[str, Any], param: str) -> None:
    assert refused(completion, **fields).param == param


def test_a_prompt_of_no_tokens_is_refused(tokenizer_dirs: dict[str, Path]) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import ByteLevel

    path = tokenizer_dirs["byte_level"].parent / "without_bos"
    path.mkdir(exist_ok=True)
    for file in tokenizer_dirs["byte_level"].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.post_processor = ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    with pytest.raises(ApiError) as caught:
        parse_completion(encode({"model": "demo", "prompt": ""}), Tokenizer(path), LIMITS)
    assert (caught.value.status, caught.value.param) == (400, "prompt")
