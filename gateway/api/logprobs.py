"""Log probabilities in a response: which tokens' entries may be shown when, and OpenAI's and vLLM's shapes of them.

An entry goes out with the last character of its token's text: what is held back (half a character, the beginning of a
stop string) keeps its entries, and what a stop string cuts off takes them along.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ...transfer.messages import TokenLogprobs
from .parsed_request import Kind, ParsedRequest
from .text import ChoiceText, Tokenizer

NONE = "null"
MAX_BYTES_OF_ONE = 256  # JSON of one token with its log probability, generously


@dataclass(frozen=True)
class Entry:
    """One token of a choice's text, which begins `offset` characters into it. The first token of a prompt has no
    probability, since nothing stands before it."""

    token: int
    offset: int
    said: TokenLogprobs | None


@dataclass
class _Held:
    entry: Entry
    end: int | None = None  # decoded characters by which all of its text is out; None while that is not known


class Entries:
    """The entries of one choice on their way out. `echoed`: how much text stands before the choice's own."""

    def __init__(self, echoed: int) -> None:
        self._echoed = echoed
        self._held: deque[_Held] = deque()
        self._ready: list[Entry] = []
        self._decoded = 0

    def echo(self, prompt: Sequence[Entry]) -> None:
        """The prompt's tokens are part of the choice's text."""
        self._ready += prompt

    def add(self, token: int, said: TokenLogprobs, text: ChoiceText) -> None:
        """A token that `text` is about to take."""
        self._held.append(_Held(Entry(token, self._echoed + text.num_chars, said)))

    def take(self, text: ChoiceText, *, over: bool) -> list[Entry]:
        """Those that may be shown now that `text` has taken the newest token; all that ever will be when it is over."""
        self._settle(text)
        ready, self._ready = self._ready, []
        if over:
            cut = self._echoed + text.shown_chars
            ready += [held.entry for held in self._held if text.stopped is None or held.entry.offset < cut]
            self._held.clear()
            return ready
        while self._held and (end := self._held[0].end) is not None and end <= text.shown_chars:
            ready.append(self._held.popleft().entry)
        return ready

    def _settle(self, text: ChoiceText) -> None:
        """New text completes all tokens but the newest, and that one too unless something of it is pending."""
        grown = text.num_chars > self._decoded
        self._decoded = text.num_chars
        newest = len(self._held) - 1
        for number, held in enumerate(self._held):
            if held.end is None and (not text.pending or (grown and number < newest)):
                held.end = self._decoded


def prompt_entries(
    prompt: Sequence[int], text: str, said: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[Entry]:
    """The entries of an echoed prompt. Special tokens that its text does not show (a BOS) begin where it begins."""
    decoder = tokenizer.incremental(skip_special_tokens=False)
    offsets, decoded = [], 0
    for token in prompt:
        offsets.append(decoded)
        decoded += len(decoder.push(token))
    hidden = max(decoded + len(decoder.flush()) - len(text), 0)
    return [
        Entry(token, min(max(offset - hidden, 0), len(text)), entry)
        for token, offset, entry in zip(prompt, offsets, (None, *said), strict=True)
    ]


class LogprobWriter:
    """Entries as JSON. `top`: how many of the likeliest tokens to name beside each."""

    def __init__(self, kind: Kind, top: int, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._kind = kind
        self._top = top
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._words: dict[int, tuple[str, bytes | None]] = {}

    def member(self, entries: Sequence[Entry]) -> str:
        """The value of a choice's `logprobs`."""
        return self._chat(entries) if self._kind == "chat" else self._completion(entries)

    def _chat(self, entries: Sequence[Entry]) -> str:
        content = []
        for entry in entries:
            assert entry.said is not None, "a chat's prompt is not shown"
            tops = ",".join(f"{{{self._named(*pair)}}}" for pair in entry.said.top[: self._top])
            content.append(f'{{{self._named(entry.token, entry.said.logprob)},"top_logprobs":[{tops}]}}')
        return f'{{"content":[{",".join(content)}],"refusal":null}}'

    def _named(self, token: int, logprob: float) -> str:
        word, raw = self._word(token)
        return f'"token":{json.dumps(word)},"logprob":{logprob!r},"bytes":{NONE if raw is None else list(raw)}'

    def _completion(self, entries: Sequence[Entry]) -> str:
        columns = {
            "tokens": [self._word(entry.token)[0] for entry in entries],
            "token_logprobs": [entry.said and entry.said.logprob for entry in entries],
            "top_logprobs": [entry.said and self._tops(entry.token, entry.said) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }
        return json.dumps(columns, separators=(",", ":"))

    def _tops(self, token: int, said: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the token itself; of two that read the same the likelier one."""
        tops: dict[str, float] = {}
        for other, logprob in (*said.top[: self._top], (token, said.logprob)):
            tops.setdefault(self._word(other)[0], logprob)
        return tops

    def prompt(self, prompt: Sequence[int], said: Sequence[TokenLogprobs]) -> str:
        """The value of `prompt_logprobs`."""
        parts = [self._ranked(token, entry) for token, entry in zip(prompt[1:], said, strict=True)]
        return f"[{','.join([NONE, *parts])}]"

    def _ranked(self, token: int, said: TokenLogprobs) -> str:
        """The token itself, then the likeliest ones."""
        others = [(other, rank, logprob) for rank, (other, logprob) in enumerate(said.top[: self._top], start=1)]
        listed = [(token, said.rank, said.logprob), *(item for item in others if item[0] != token)]
        return json.dumps(
            {
                str(other): {"logprob": logprob, "rank": rank, "decoded_token": self._word(other)[0]}
                for other, rank, logprob in listed
            },
            separators=(",", ":"),
        )

    def _word(self, token: int) -> tuple[str, bytes | None]:
        """How a token is shown, and the bytes it puts into the text (None if it puts none)."""
        known = self._words.get(token)
        if known is None:
            raw = self._tokenizer.token_bytes(token, skip_special_tokens=self._skip_special_tokens)
            known = self._words[token] = self._readable(token, raw), raw
        return known

    def _readable(self, token: int, raw: bytes | None) -> str:
        if raw is None:
            return self._tokenizer.token_strings([token])[0] or f"<token {token}>"
        try:
            return raw.decode()
        except UnicodeDecodeError:  # part of a character: as OpenAI writes it
            escaped = "".join(f"\\x{byte:02x}" for byte in raw)
            return escaped if self._kind == "chat" else f"bytes:{escaped}"


class Logprobs:
    """All that one response says of log probabilities, from the workers' words to JSON."""

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._echoed = request.echo_texts if request.kind == "completion" else ()
        num_choices = len(request.prompts) * request.num_sampled
        texts = self._echoed or [""] * len(request.prompts)
        self._entries = [Entries(len(texts[choice // request.num_sampled])) for choice in range(num_choices)]
        self._sums = [0.0] * num_choices  # over all tokens of a choice
        self._counts = [0] * num_choices
        self._said: dict[int, Sequence[TokenLogprobs]] = {}  # by prompt
        self._writer = self._writer_of(request.logprobs)
        self._prompt_writer = self._writer_of(request.prompt_logprobs)

    def _writer_of(self, top: int | None) -> LogprobWriter:
        skip = self._request.text.skip_special_tokens
        return LogprobWriter(self._request.kind, top or 0, self._tokenizer, skip_special_tokens=skip)

    @property
    def shown(self) -> bool:
        return self._request.logprobs is not None

    @property
    def prompt_bytes(self) -> int:
        """The most that what is said of the prompts may come to in a response."""
        request = self._request
        tops = (request.prompt_logprobs, request.logprobs if self._echoed else None)
        named = sum(top + 2 for top in tops if top is not None)
        return request.prompt_tokens * request.n * named * MAX_BYTES_OF_ONE

    def prompt(self, first_choice: int, said: Sequence[TokenLogprobs]) -> None:
        """All of a prompt's tokens, before any token of its choices."""
        number = first_choice // self._request.num_sampled
        self._said[number] = said
        if self.shown and self._echoed:
            prompt = self._request.prompts[number]
            entries = prompt_entries(prompt, self._echoed[number], said, self._tokenizer)
            for choice in range(first_choice, first_choice + self._request.num_sampled):
                self._entries[choice].echo(entries)

    def add(self, choice: int, token: int, said: TokenLogprobs | None, text: ChoiceText) -> None:
        """A token that `text` is about to take."""
        if said is None:
            return
        self._sums[choice] += said.logprob
        self._counts[choice] += 1
        if self.shown:
            self._entries[choice].add(token, said, text)

    def take(self, choice: int, text: ChoiceText, *, over: bool) -> list[Entry]:
        """The entries that may be shown now that `text` has taken the token (or has ended)."""
        return self._entries[choice].take(text, over=over) if self.shown else []

    def member(self, entries: Sequence[Entry]) -> str:
        """The value of `logprobs` beside a text."""
        return self._writer.member(entries) if self.shown else NONE

    def of_prompt(self, number: int) -> str:
        """The value of `prompt_logprobs`; empty when it was not asked for."""
        if self._request.prompt_logprobs is None:
            return ""
        return self._prompt_writer.prompt(self._request.prompts[number], self._said[number])

    def best(self) -> list[int]:
        """The choices to show, prompt by prompt; of more than n the n with the highest mean log probability a token,
        the best first."""
        request, shown = self._request, []
        for first in range(0, len(self._entries), request.num_sampled):
            choices = list(range(first, first + request.num_sampled))
            if request.num_sampled > request.n:
                choices.sort(key=lambda choice: -self._sums[choice] / max(self._counts[choice], 1))
            shown += choices[: request.n]
        return shown
