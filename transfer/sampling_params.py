"""How the tokens of one choice are picked: the part of a request that travels unchanged to both pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

MAX_TOKENS_IN_REQUEST = 4_000_000
MAX_GRAMMAR_CHARS = 262_144
MAX_LOGPROBS = 20

CLOSED = ConfigDict(extra="forbid")

Token = Annotated[int, Field(ge=0, le=1 << 31)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


@dataclass(frozen=True, config=CLOSED)
class Grammar:
    """What a choice's text must match: JSON, a JSON schema, a regular expression, or an EBNF grammar (root rule
    `root`). `text` is the schema, expression or grammar; it is empty for `json`, any JSON value that is an object.

    Behind reasoning: with `after` all tokens up to the first one of that id are free. With `opening`, too, they are
    free only where `opening` is the very first token, which may be chosen beside what the grammar allows there.
    """

    kind: Literal["json", "json_schema", "regex", "ebnf"]
    text: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
    after: Token | None = None
    opening: Token | None = None

    def start(self, output: Sequence[int]) -> int | None:
        """How many of a choice's tokens come before those that it is about; None while it is not in force."""
        opened = self.opening is None or (bool(output) and output[0] == self.opening)
        if self.after is None or not opened:
            return 0
        return output.index(self.after) + 1 if self.after in output else None


@dataclass(frozen=True, config=CLOSED)
class SamplingParams:
    """How the tokens of one choice are picked. Everything is resolved: the gateway filled in defaults and seed.

    `top_k` 0 means off. `seed` is the noise key: the noise of a token depends on (seed, choice, position) only.
    `min_tokens` bars EOS and `stop_token_ids` until that many tokens are out. `max_tokens` 0 is for requests that only
    want their prompt scored; the token that is sampled all the same does not count.
    `logprobs`: each token comes with its log probability and that of so many most likely ones; None: without.
    `prompt_logprobs`: the same for the tokens of the prompt.
    """

    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS_IN_REQUEST)]
    seed: Annotated[int, Field(ge=0, lt=1 << 64)]
    temperature: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=1e4)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=-1e4, le=1e4)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-1e4, le=1e4)] = 0.0
    logit_bias: Annotated[dict[Token, Annotated[float, Field(ge=-1e4, le=1e4)]], Field(max_length=1024)] = Field(
        default_factory=dict
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS_IN_REQUEST)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Token], Field(max_length=1024)] = Field(default_factory=list)
    grammar: Grammar | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
