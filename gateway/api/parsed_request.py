"""`ParsedRequest`: one HTTP request after validation, templating and tokenising; the same for both endpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...transfer.sampling_params import SamplingParams
from .chat_output import ONLY_CONTENT, OutputFormat
from .text import TextOptions

Kind = Literal["chat", "completion"]


@dataclass(frozen=True)
class ModelLimits:
    """What the system can take now.

    `names` are the names the model is served under. `pool_tokens` is the largest prompt + output of one choice, in
    tokens, that the decode pool can ever hold; while no decode worker is known pass `max_model_len`.
    """

    names: tuple[str, ...]
    max_model_len: int
    pool_tokens: int


@dataclass(frozen=True)
class ParsedRequest:
    """What the orchestration needs to know. Choices are indexed prompt-major: choice i belongs to prompt i // n.

    `params` holds one entry per prompt: they differ in `max_tokens` when the client gave none (it is what the prompt
    leaves free), and in `seed` when the client gave none (equal prompts must not get equal answers).
    `echo_texts` holds the text to show before each prompt's choices, or nothing when echo is off.
    `output` says how the text of a chat's choices is to be read.
    `logprobs`, `prompt_logprobs`: how many likeliest tokens the response names beside each; None: no such member.
    `best_of` choices are sampled for each prompt, and the `n` likeliest shown.
    `grammar_field` is the field that asked for `params`' grammar ("" when there is none).
    `include_usage` and `continuous_usage` concern streams only.
    """

    kind: Kind
    model: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    params: tuple[SamplingParams, ...]
    text: TextOptions
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echo_texts: tuple[str, ...]
    cache_salt: str
    priority: int
    grammar_field: str = ""
    max_tokens_given: bool = True  # else the client leaves the length of the answer to the model
    output: OutputFormat = ONLY_CONTENT
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int = 1

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_sampled(self) -> int:
        """Choices that are computed for each prompt."""
        return max(self.n, self.best_of)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens as `usage` counts them: each prompt once, whatever n is."""
        return sum(len(prompt) for prompt in self.prompts)
