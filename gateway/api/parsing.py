"""HTTP body → `ParsedRequest`: validate, apply the chat template, tokenise once, resolve every default and limit.

Nothing that comes in as a body leaves as anything but a ParsedRequest or an ApiError 400/404 that names the field.
Both functions take milliseconds (templating, tokenising): run them off the event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ...transfer.sampling_params import Grammar, SamplingParams
from .chat_messages import message_text
from .chat_request import parse_chat_request
from .errors import ApiError, invalid, model_not_found, not_supported
from .json_body import load_object
from .openai_api import INT32, MAX_PROMPTS, TAG, ChatRequest, CommonRequest, CompletionRequest
from .parsed_request import Kind, ModelLimits, ParsedRequest
from .structured import grammar_of
from .text import TextOptions, Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
SMALLEST_TOP_P = 1e-6  # top_p 0 means the likeliest token only; the sampler wants a positive mass

OBJECT_ERRORS = ("model_type", "dict_type")  # pydantic's text for these names our classes

Request = TypeVar("Request", bound=BaseModel)

# Fields of the API that are refused unless their value asks for nothing.
_NOT_YET: dict[str, Callable[[Any], bool]] = {
    "use_beam_search": lambda value: value is False,
    "suffix": lambda value: value == "",
    "modalities": lambda value: value == ["text"],
    "audio": lambda value: False,
}


def parse_chat(body: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> ParsedRequest:
    """POST /v1/chat/completions. Raises ApiError."""
    request = _validate(ChatRequest, body, limits)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true.", "top_logprobs")
    chat = parse_chat_request(request, tokenizer, max_tokens=limits.max_model_len)
    prompt = chat.prompt
    _check_prompt(prompt, tokenizer, "messages")
    plain = request.max_completion_tokens is None
    limit_field = "max_tokens" if plain else "max_completion_tokens"
    asked = request.max_tokens if plain else request.max_completion_tokens
    max_tokens = _resolve_max_tokens(len(prompt), asked, None, limits, "messages", limit_field)
    last = request.messages[-1]
    echo_texts = (message_text(last, "messages"),) if request.echo and last.role == "assistant" else ()
    likelihoods = Likelihoods((request.top_logprobs or 0) if request.logprobs else None, request.prompt_logprobs)
    parsed = _parsed("chat", request, [prompt], [max_tokens], echo_texts, likelihoods, tokenizer)
    return chat.applied_to(replace(parsed, max_tokens_given=asked is not None))


def parse_completion(body: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> ParsedRequest:
    """POST /v1/completions. Raises ApiError."""
    request = _validate(CompletionRequest, body, limits)
    if request.best_of is not None and request.best_of < request.n:
        raise invalid(f"best_of ({request.best_of}) must not be less than n ({request.n}).", "best_of")
    best_of = request.n if request.best_of is None else request.best_of
    if best_of > request.n and request.stream:
        raise invalid("best_of greater than n cannot be streamed: which choices are best shows at the end.", "best_of")
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens: 0 is only allowed with echo.", "max_tokens")
    prompts, texts = _prompts(request, tokenizer, limits)
    if len(prompts) * best_of > MAX_PROMPTS:
        raise invalid(f"n: {len(prompts)} prompts times {best_of} choices are more than {MAX_PROMPTS}.", "n")
    max_tokens = []
    for prompt in prompts:
        _check_prompt(prompt, tokenizer, "prompt")
        max_tokens.append(
            _resolve_max_tokens(
                len(prompt), request.max_tokens, DEFAULT_COMPLETION_TOKENS, limits, "prompt", "max_tokens"
            )
        )
    echo_texts: tuple[str, ...] = ()
    if request.echo:
        echo_texts = tuple(texts or [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts])
    likelihoods = Likelihoods(request.logprobs, request.prompt_logprobs, echoed=request.echo, best_of=best_of)
    return _parsed("completion", request, prompts, max_tokens, echo_texts, likelihoods, tokenizer)


@dataclass(frozen=True)
class Likelihoods:
    """What the response is to say of probabilities (see `ParsedRequest`), and what that asks of the workers."""

    logprobs: int | None
    prompt_logprobs: int | None
    echoed: bool = False  # does `logprobs` include the prompt's tokens?
    best_of: int = 1

    def of_tokens(self, n: int) -> int | None:
        """For `SamplingParams.logprobs`: the best of more than n are found by their tokens' probabilities."""
        return 0 if self.logprobs is None and self.best_of > n else self.logprobs

    @property
    def of_prompt(self) -> int | None:
        """For `SamplingParams.prompt_logprobs`."""
        asked = (self.prompt_logprobs, self.logprobs if self.echoed else None)
        return max((number for number in asked if number is not None), default=None)


def _validate(schema: type[Request], body: bytes, limits: ModelLimits) -> Request:
    """The body as `schema`, its model known, none of its fields one that is not supported."""
    fields = load_object(body)
    request = validated(schema, fields)
    model = fields["model"]
    if model not in limits.names:
        raise model_not_found(model)
    for name, asks_nothing in _NOT_YET.items():
        if name in schema.model_fields and name in fields and not asks_nothing(fields[name]):
            raise not_supported(name)
    return request


def validated(schema: type[Request], fields: dict[str, Any]) -> Request:
    """The fields as `schema`. Raises ApiError 400 naming the first one that is wrong."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise _from_validation(error) from None


def _from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong, by its path in the body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"] if not str(part).startswith(TAG))
    what = "Input should be an object" if first["type"] in OBJECT_ERRORS else first["msg"]
    return invalid(f"{path}: {what}", path or None)


def _prompts(
    request: CompletionRequest, tokenizer: Tokenizer, limits: ModelLimits
) -> tuple[list[list[int]], list[str] | None]:
    """Token ids per prompt, and the prompts' texts when they came as text."""
    prompt = request.prompt
    texts = [prompt] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, str)]
    if texts:
        for text in texts:
            tokenizer.require_fit(text, limits.max_model_len, "prompt")
        return [tokenizer.encode(text) for text in texts], texts
    token_lists = [item for item in prompt if isinstance(item, list)]
    return token_lists or [[item for item in prompt if isinstance(item, int)]], None


def _check_prompt(prompt: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    if not prompt:
        raise invalid(f"{param}: there must be at least one token.", param)
    check_tokens((min(prompt), max(prompt)), tokenizer, param)


def check_tokens(tokens: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    for token in tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise invalid(f"{param}: token id {token!s:.40} is not in 0…{tokenizer.vocab_size - 1}.", param)


def _resolve_max_tokens(
    prompt_tokens: int, asked: int | None, default: int | None, limits: ModelLimits, prompt_field: str, limit_field: str
) -> int:
    """How many tokens a choice may have: what was asked for, else what the prompt leaves free (at most `default`)."""
    if asked == 0 and prompt_field == "messages":  # only a completion can be its prompt and nothing else
        raise invalid(f"{limit_field}: Input should be greater than or equal to 1", limit_field)
    bounds = (
        (limits.max_model_len, f"max_model_len {limits.max_model_len}"),
        (limits.pool_tokens, f"pool_tokens {limits.pool_tokens}, what the decode pool's KV cache can hold"),
    )
    for bound, which in bounds:
        # The first words are OpenAI's: clients know by them that a shorter history would do.
        limit = f"This model's maximum context length is {bound} tokens ({which})"
        if prompt_tokens >= bound and not (asked == 0 and prompt_tokens == bound):
            raise invalid(
                f"{limit}, and the prompt's {prompt_tokens} leave no room for output.",
                prompt_field,
                "context_length_exceeded",
            )
        if asked is not None and prompt_tokens + asked > bound:
            raise invalid(
                f"{limit}, and the prompt's {prompt_tokens} and {limit_field} ({asked!s:.40}) are together more.",
                limit_field,
                "context_length_exceeded",
            )
    room = min(limits.max_model_len, limits.pool_tokens) - prompt_tokens
    return min(room, default or room) if asked is None else asked


def _parsed(
    kind: Kind,
    request: CommonRequest,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    echo_texts: tuple[str, ...],
    likelihoods: Likelihoods,
    tokenizer: Tokenizer,
) -> ParsedRequest:
    options = request.stream_options
    if options is not None and not request.stream:
        raise invalid("stream_options is only allowed when stream is true.", "stream_options")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    logit_bias = _logit_bias(request, tokenizer)
    check_tokens(request.stop_token_ids, tokenizer, "stop_token_ids")
    grammar, grammar_field = grammar_of(request)
    return ParsedRequest(
        kind=kind,
        model=request.model,
        prompts=tuple(map(tuple, prompts)),
        n=request.n,
        params=tuple(
            _sampling_params(request, limit, logit_bias, likelihoods, tokenizer, grammar) for limit in max_tokens
        ),
        text=TextOptions(
            stop=tuple(dict.fromkeys(stops)),
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            min_tokens=request.min_tokens,
        ),
        stream=request.stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        return_token_ids=request.return_token_ids,
        echo_texts=echo_texts,
        cache_salt=request.cache_salt,
        priority=request.priority,
        logprobs=likelihoods.logprobs,
        prompt_logprobs=likelihoods.prompt_logprobs,
        best_of=likelihoods.best_of,
        grammar_field=grammar_field,
    )


def _sampling_params(
    request: CommonRequest,
    max_tokens: int,
    logit_bias: dict[int, float],
    likelihoods: Likelihoods,
    tokenizer: Tokenizer,
    grammar: Grammar | None,
) -> SamplingParams:
    if request.min_tokens > max_tokens:
        raise invalid(
            f"min_tokens ({request.min_tokens!s:.40}) must not be more than max_tokens ({max_tokens}).", "min_tokens"
        )
    seed = secrets.randbits(64) if request.seed is None else request.seed % (1 << 64)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=request.temperature,
        top_k=request.top_k if 0 < request.top_k < min(tokenizer.vocab_size, INT32) else 0,
        top_p=max(request.top_p, SMALLEST_TOP_P),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=logit_bias,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        logprobs=likelihoods.of_tokens(request.n),
        prompt_logprobs=likelihoods.of_prompt,
        grammar=grammar,
    )


def _logit_bias(request: CommonRequest, tokenizer: Tokenizer) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in request.logit_bias.items():
        param = f"logit_bias.{key:.40}"
        if not (key.isascii() and key.isdecimal() and len(key) <= 20):
            raise invalid(f"{param}: the key must be a token id.", param)
        check_tokens([int(key)], tokenizer, param)
        result[int(key)] = bias
    return result
