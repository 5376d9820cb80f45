"""Tool calls out of the text of an answer, as it grows: what is content, which functions are called, with what.

A format is how a family of models writes calls:

    hermes        <tool_call>{"name": "f", "arguments": {…}}</tool_call>, as many as there are calls (also Qwen)
    llama3_json   {"name": "f", "parameters": {…}} as the whole answer, or anywhere behind <|python_tag|>;
                  further calls behind ";"
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]

Under `required` the answer is JSON by grammar, whatever the model's format (`FORCED`).

The rules, the same for all: text around calls is content. What begins like a call and turns out not to be one
(broken JSON, an unknown function) is content, to the last character. Once a call counts (see `CallReader`) its
arguments are handed out as they come, so what breaks later stays there, for the client to see: up to the closing
marker or the end. Whitespace between content and a call is dropped.

Pieces may be cut anywhere: the calls and the content add up to the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from .json_stream import WHITESPACE, CallReader, Verdict
from .stop_strings import open_start

ToolParserName = Literal["hermes", "llama3_json", "mistral"]

ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class CallFormat:
    """`opening` stands before calls, `closing` behind one. `bare`: a call may also be the very first thing in the
    answer. `array`: calls may stand in a JSON array. `separator` stands between calls outside of one."""

    opening: str = ""
    closing: str = ""
    bare: bool = False
    array: bool = False
    separator: str = ""


FORMATS: dict[ToolParserName, CallFormat] = {
    "hermes": CallFormat(opening="<tool_call>", closing="</tool_call>"),
    "llama3_json": CallFormat(opening="<|python_tag|>", bare=True, separator=";"),
    "mistral": CallFormat(opening="[TOOL_CALLS]", array=True),
}
FORCED = CallFormat(bare=True, array=True)


def format_of_template(template: str) -> ToolParserName:
    """The format that a chat template shows its model."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3_json"
    return "hermes"


@dataclass(frozen=True)
class CallDelta:
    """What is new of call number `index`. The first delta of a call has its `name`, all others an empty one."""

    index: int
    name: str = ""
    arguments: str = ""


class State(Enum):
    TEXT = auto()  # content; an opening marker may come
    BEGIN = auto()  # a call must come now
    CALL = auto()
    BEHIND = auto()  # after a call: closing marker, separator, the end of the array, or no more of them
    REST = auto()  # the arguments turned out to be broken, and all up to the closing marker is theirs


class ToolCallParser:
    """`feed` takes text in and gives (content, deltas of calls) out.

    `single`: there can be one call only; `over` is true when it is complete, and nothing counts any more.
    """

    def __init__(self, form: CallFormat, names: Collection[str], *, single: bool = False) -> None:
        self._form = form
        self._names = names
        self._single = single
        self._state = State.BEGIN if form.bare else State.TEXT
        self._text = ""  # not looked at yet
        self._raw = ""  # looked at, and content again if no call comes of it
        self._opened = 0  # characters of `_raw` that may not be looked at again
        self._space = ""  # whitespace that is content if content follows, or if no call ever comes
        self._in_array = False
        self._call = self._new_reader()
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self.num_calls = 0
        self.over = False

    @property
    def unfinished(self) -> bool:
        """Is the text within the arguments of a call?"""
        return self._state is State.CALL and self._call.committed

    def _new_reader(self) -> CallReader:
        return CallReader(self._names, ARGUMENT_KEYS)

    def feed(self, text: str, *, final: bool = False) -> tuple[str, list[CallDelta]]:
        self._text += text
        while not self.over and self._step(final):
            continue
        if final and self.num_calls == 0:
            self._content.append(self._space)
        content, deltas = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return content, deltas

    def _step(self, final: bool) -> bool:
        """Take the next bit of `_text`. False when more of it is needed first."""
        match self._state:
            case State.TEXT:
                return self._in_text(final)
            case State.BEGIN:
                return self._at_begin(final)
            case State.CALL:
                return self._in_call(final)
            case State.BEHIND:
                return self._behind(final)
            case State.REST:
                return self._in_rest(final)

    def _say(self, content: str) -> None:
        if shown := content.rstrip(WHITESPACE):
            self._content.append(self._space + shown)
            self._space = ""
        self._space += content[len(shown) :]

    # --- around calls ------------------------------------------------------------------------------------------------

    def _in_text(self, final: bool) -> bool:
        opening = self._form.opening
        at = self._text.find(opening) if opening else -1
        if at >= 0:
            self._say(self._text[:at])
            self._text = self._text[at + len(opening) :]
            self._raw, self._opened, self._state = opening, len(opening), State.BEGIN
            return True
        held_at = len(self._text) if final or not opening else open_start(self._text, opening)
        self._say(self._text[:held_at])
        self._text = self._text[held_at:]
        return False

    def _at_begin(self, final: bool) -> bool:
        """Behind an opening marker, a separator or a comma, or where the whole answer begins."""
        self._take_space()
        if not self._text:
            return final and self._no_call()
        char = self._text[0]
        if char == "[" and self._form.array and not self._in_array:
            self._in_array = True
            self._take_one()
        elif char == "{":
            self._call, self._state = self._new_reader(), State.CALL
        else:
            self._no_call()
        return True

    def _behind(self, final: bool) -> bool:
        self._take_space()
        form = self._form
        if not self._text:
            if final:
                self._settle()
            return False
        char = self._text[0]
        if self._in_array and char in ",]":
            self._take_one()
            self._in_array = char == ","
            self._state = State.BEGIN if self._in_array else State.TEXT
            self._opened = len(self._raw)
            if not self._in_array:
                self._settle()
        elif form.separator and char == form.separator:
            self._take_one()
            self._opened, self._state = len(self._raw), State.BEGIN
        elif form.closing and self._text.startswith(form.closing):
            self._text = self._text[len(form.closing) :]
            self._settle()
        elif form.closing and char == "}":  # small models lose count of braces
            self._take_one()
        elif form.closing and not final and form.closing.startswith(self._text):
            return False
        else:
            self._text = self._raw + self._text
            self._settle()
        return True

    def _settle(self) -> None:
        """A call is done with: what was looked at behind it is no content."""
        self._raw, self._opened, self._in_array, self._state = "", 0, False, State.TEXT

    def _take_one(self) -> None:
        self._raw += self._text[0]
        self._text = self._text[1:]

    def _take_space(self) -> None:
        rest = self._text.lstrip(WHITESPACE)
        self._raw += self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _no_call(self) -> bool:
        """What was looked at is text: say what was an opening, and look at the rest of it again."""
        opened = self._opened
        self._say(self._raw[:opened])
        self._text = self._raw[opened:] + self._text
        self._settle()
        return True

    # --- in a call ---------------------------------------------------------------------------------------------------

    def _in_call(self, final: bool) -> bool:
        counted = self._call.committed
        verdict, taken = Verdict.MORE, 0
        while verdict is Verdict.MORE and taken < len(self._text):
            verdict = self._call.push(self._text[taken])
            taken += verdict in (Verdict.MORE, Verdict.WHOLE)
        self._raw += self._text[:taken]
        self._text = self._text[taken:]
        if not self._call.committed:
            return (verdict is Verdict.NO_CALL or final) and self._no_call()
        arguments = self._call.take_arguments()
        if not counted:
            assert self._call.name is not None
            self._deltas.append(CallDelta(self.num_calls, self._call.name))
            self.num_calls += 1
            self._space = ""
        if arguments:
            self._deltas.append(CallDelta(self.num_calls - 1, "", arguments))
        self._raw, self._opened = "", 0
        if verdict is Verdict.MORE:
            return False
        self._state = State.REST if verdict is Verdict.BROKEN else State.BEHIND
        self.over = self._single and self._state is State.BEHIND
        return True

    def _in_rest(self, final: bool) -> bool:
        closing = self._form.closing
        at = self._text.find(closing) if closing else -1
        found = at >= 0
        if not found:
            at = len(self._text) if final or not closing else open_start(self._text, closing)
        if at:
            self._deltas.append(CallDelta(self.num_calls - 1, "", self._text[:at]))
        self._text = self._text[at + len(closing) if found else at :]
        if found:
            self._settle()
            self.over = self._single
        return found


class NamedCall:
    """The answer is, by grammar, nothing but the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0
        self.over = False
        self.unfinished = False  # not looked at: it makes no difference to the finish reason

    def feed(self, text: str, *, final: bool = False) -> tuple[str, list[CallDelta]]:
        deltas = []
        if self.num_calls == 0 and (text or final):
            self.num_calls = 1
            deltas.append(CallDelta(0, self._name))
        if text:
            deltas.append(CallDelta(0, "", text))
        return "", deltas
