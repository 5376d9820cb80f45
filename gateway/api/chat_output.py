"""The text of one choice, as it grows, as what a chat message is made of: reasoning, content, tool calls.

    text ─▶ reasoning.ReasoningSplitter ─▶ tool_parsers.ToolCallParser ─▶ Delta

Streamed and whole answers go through the same deltas, so they say the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...transfer.messages import Finish
from .reasoning import Opened, ReasoningParserName, ReasoningSplitter
from .tool_parsers import FORCED, FORMATS, CallDelta, NamedCall, ToolCallParser, ToolParserName

FinishReason = Finish | Literal["tool_calls", "function_call"]
ToolParserChoice = Literal["auto", ToolParserName]
ToolMode = Literal["auto", "required", "named"]


@dataclass(frozen=True)
class ChatStyle:
    """How the model of this gateway writes what is more than text; `tool_parser` "auto": as its template shows."""

    tool_parser: ToolParserChoice = "auto"
    reasoning_parser: ReasoningParserName = "none"


PLAIN_STYLE = ChatStyle()


@dataclass(frozen=True)
class Calling:
    """Which calls an answer may hold. `names` are the functions that may be called (with `named` it is the one),
    `parser` the model's format, `legacy` the deprecated shape (`function_call`), which knows one call only."""

    mode: ToolMode
    names: tuple[str, ...]
    parser: ToolParserName = "hermes"
    parallel: bool = True
    legacy: bool = False


@dataclass(frozen=True)
class OutputFormat:
    """How the text of a request's choices is to be read. `reasoning` None: no parser is on."""

    calling: Calling | None = None
    reasoning: Opened | None = None


ONLY_CONTENT = OutputFormat()


@dataclass(frozen=True)
class Delta:
    """What is new of a message."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()


@dataclass(frozen=True)
class Call:
    """One whole call, its arguments as the model wrote them."""

    name: str
    arguments: str


class Message:
    """All deltas of a choice, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []  # of each call

    def add(self, delta: Delta) -> None:
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.name:
                self._names.append(call.name)
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[Call]:
        return [Call(name, "".join(arguments)) for name, arguments in zip(self._names, self._arguments, strict=True)]


def new_call_id(parser: ToolParserName) -> str:
    """The templates of Mistral's models refuse ids that are not nine letters or digits."""
    return secrets.token_hex(5)[:9] if parser == "mistral" else f"call_{secrets.token_hex(12)}"


class ChatOutput:
    """Reads one choice. `over`: no further text counts, since the one call there may be is complete."""

    def __init__(self, form: OutputFormat) -> None:
        self._calling = form.calling
        self._splitter = ReasoningSplitter(form.reasoning) if form.reasoning else None
        self._calls = _parser(form.calling) if form.calling else None
        self._token_ends: list[int] = []  # characters of text up to the end of each token of the reasoning
        self._reasoning_tokens = 0  # of reasoning that is over

    @property
    def over(self) -> bool:
        return self._calls is not None and self._calls.over

    @property
    def reasoning_tokens(self) -> int:
        """Exact at the end: every token up to the one that completes the closing marker."""
        if self._splitter is not None and self._splitter.inside:
            return len(self._token_ends)
        return self._reasoning_tokens

    def feed(self, text: str, *, token_end: int | None, final: bool) -> Delta:
        """`text` is new; `token_end` counts all characters of the tokens so far, also those held back, when there is
        a new token; `final`: nothing follows."""
        reasoning, content = "", text
        if self._splitter is not None:
            if token_end is not None and self._splitter.ended_at is None:
                self._token_ends.append(token_end)
            reasoning, content = self._splitter.feed(text, final=final)
            ended_at = self._splitter.ended_at
            if ended_at is not None and self._token_ends:
                self._reasoning_tokens = sum(end < ended_at for end in self._token_ends) + 1
                self._token_ends.clear()
        if self._calls is None:
            return Delta(content, reasoning)
        if self._splitter is not None and self._splitter.inside:
            return Delta("", reasoning)
        said, calls = self._calls.feed(content, final=final)
        return Delta(said, reasoning, calls)

    def finish_reason(self, finish: Finish) -> FinishReason:
        """What the client is told: a call that was the model's to make has a reason of its own; one that the client
        had named has not, nor has one that breaks off in its arguments (at a stop string), which nobody can make."""
        if finish != "stop" or self._calling is None or self._calls is None or not self._calls.num_calls:
            return finish
        if self._calling.mode == "named" or self._calls.unfinished:
            return "stop"
        return "function_call" if self._calling.legacy else "tool_calls"


def _parser(calling: Calling) -> ToolCallParser | NamedCall:
    if calling.mode == "named":
        return NamedCall(calling.names[0])
    form = FORCED if calling.mode == "required" else FORMATS[calling.parser]
    return ToolCallParser(form, calling.names, single=not calling.parallel)
