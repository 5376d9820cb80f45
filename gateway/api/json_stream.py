"""JSON followed one character at a time: what is valid so far, and where the members of a call begin and end.

Strict, as `json.loads` is: what `JsonScanner` calls complete, `json.loads` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto

WHITESPACE = " \t\n\r"
LITERALS = {"t": "true", "f": "false", "n": "null"}
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_SO_FAR = re.compile(r"-?((0|[1-9][0-9]*)(\.([0-9]+([eE]([+-]?[0-9]*)?)?)?|[eE]([+-]?[0-9]*)?)?)?")


class Expect(Enum):
    """What the scanner stands in, or waits for."""

    VALUE = auto()
    ITEM_OR_END = auto()  # behind "["
    KEY_OR_END = auto()  # behind "{"
    KEY = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()
    NOTHING = auto()  # the value is complete


class JsonScanner:
    """One JSON value. `push` says whether the text is still the beginning of one; `depth` counts open brackets."""

    def __init__(self) -> None:
        self.expect = Expect.VALUE
        self._open: list[str] = []
        self._token = ""  # of a number, a literal or an escape, so far
        self._is_key = False

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def complete(self) -> bool:
        return self.expect is Expect.NOTHING

    def push(self, char: str) -> bool:
        match self.expect:
            case Expect.STRING:
                return self._in_string(char)
            case Expect.ESCAPE | Expect.HEX:
                return self._in_escape(char)
            case Expect.NUMBER:
                return self._in_number(char)
            case Expect.LITERAL:
                return self._in_literal(char)
        return char in WHITESPACE or self._between(char)

    def _between(self, char: str) -> bool:
        """A character outside of strings, numbers and literals, not whitespace."""
        match self.expect:
            case Expect.VALUE:
                return self._begin_value(char)
            case Expect.ITEM_OR_END:
                return self._close(char) if char == "]" else self._begin_value(char)
            case Expect.KEY_OR_END if char == "}":
                return self._close(char)
            case Expect.KEY | Expect.KEY_OR_END if char == '"':
                self.expect, self._is_key = Expect.STRING, True
                return True
            case Expect.COLON if char == ":":
                self.expect = Expect.VALUE
                return True
            case Expect.COMMA_OR_END if char == ",":
                self.expect = Expect.KEY if self._open[-1] == "{" else Expect.VALUE
                return True
            case Expect.COMMA_OR_END:
                return self._close(char)
        return False

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self._open.append(char)
            self.expect = Expect.KEY_OR_END if char == "{" else Expect.ITEM_OR_END
        elif char == '"':
            self.expect, self._is_key = Expect.STRING, False
        elif char in "-0123456789":
            self.expect, self._token = Expect.NUMBER, char
        elif char in LITERALS:
            self.expect, self._token = Expect.LITERAL, char
        else:
            return False
        return True

    def _close(self, char: str) -> bool:
        if self._open[-1] + char not in ("{}", "[]"):
            return False
        self._open.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self.expect = Expect.COMMA_OR_END if self._open else Expect.NOTHING

    def _in_string(self, char: str) -> bool:
        if char == '"':
            if self._is_key:
                self.expect = Expect.COLON
            else:
                self._end_value()
        elif char == "\\":
            self.expect = Expect.ESCAPE
        return char >= " "

    def _in_escape(self, char: str) -> bool:
        if self.expect is Expect.ESCAPE:
            self._token = ""
            self.expect = Expect.HEX if char == "u" else Expect.STRING
            return char in '"\\/bfnrtu'
        self._token += char
        if len(self._token) == 4:
            self.expect = Expect.STRING
        return char in "0123456789abcdefABCDEF"

    def _in_number(self, char: str) -> bool:
        if NUMBER_SO_FAR.fullmatch(self._token + char):
            self._token += char
            return True
        if NUMBER.fullmatch(self._token) is None:
            return False
        self._end_value()
        return self.push(char)

    def _in_literal(self, char: str) -> bool:
        self._token += char
        whole = LITERALS[self._token[0]]
        if self._token == whole:
            self._end_value()
        return whole.startswith(self._token)


class Verdict(Enum):
    """What a character was to a call."""

    MORE = auto()  # a part of it
    WHOLE = auto()  # its last one
    NO_CALL = auto()  # not a part of it: this is no call
    OFF = auto()  # not a part of it, but by now the text counts as a call, and its arguments are complete
    BROKEN = auto()  # the same, in the middle of the arguments


class CallReader:
    """One call as a model writes it, `{"name": "f", "arguments": {…}}`, members in any order.

    It counts as a call, `committed`, once the name is that of a known function and the first value in the arguments
    has begun (or they are complete, or the call is complete without any): from then on its arguments are handed out
    as they come, and cannot be taken back. Before, everything can still turn out to be mere text.
    """

    def __init__(self, names: Collection[str], argument_keys: Collection[str]) -> None:
        self._names = names
        self._argument_keys = argument_keys
        self._json = JsonScanner()
        self._member = ""  # the text of the key or value at depth 1 that is being read
        self._key: str | None = None
        self._in_arguments = False
        self._has_arguments = False  # they are complete
        self._untaken: list[str] = []  # characters of the arguments
        self._convincing = False
        self.name: str | None = None

    @property
    def committed(self) -> bool:
        return self.name is not None and self._convincing

    def take_arguments(self) -> str:
        """What is known of the arguments and was not taken yet: the very characters of the model."""
        taken = "".join(self._untaken)
        self._untaken.clear()
        return taken

    def push(self, char: str) -> Verdict:
        before, opening, inside = self._json.expect, self._json.depth == 0, self._in_arguments
        if (opening and char != "{") or not self._json.push(char):
            return self._not_a_part
        if inside:
            self._note_argument(char, before)
        elif not opening and not self._note_member(char, before):
            return self._not_a_part
        if not self._json.complete:
            return Verdict.MORE
        if not self._has_arguments:
            self._untaken.append("{}")
            self._convincing = True
        return Verdict.WHOLE if self.committed else Verdict.NO_CALL

    @property
    def _not_a_part(self) -> Verdict:
        if not self.committed:
            return Verdict.NO_CALL
        return Verdict.BROKEN if self._in_arguments else Verdict.OFF

    def _note_argument(self, char: str, before: Expect) -> None:
        self._untaken.append(char)
        expect = self._json.expect
        began = before is Expect.VALUE and char not in WHITESPACE and expect is not Expect.LITERAL
        if began or expect is Expect.COMMA_OR_END:
            self._convincing = True
        if self._json.depth == 1:
            self._in_arguments, self._has_arguments = False, True

    def _note_member(self, char: str, before: Expect) -> bool:
        """Between the braces of the call itself. False when this cannot be a call."""
        expect = self._json.expect
        if before is Expect.VALUE and char not in WHITESPACE and self._key in self._argument_keys:
            self._in_arguments = char == "{" and not self._has_arguments
            self._untaken.append(char)
            return self._in_arguments
        if self._key == "name" and expect in (Expect.NUMBER, Expect.LITERAL):
            return False
        if self._json.depth > 1:  # in a value that is of no interest
            return self._key != "name"
        if before in (Expect.KEY, Expect.KEY_OR_END, Expect.VALUE):
            self._member = ""
        self._member += char
        if before is not Expect.STRING:
            return True
        if expect is Expect.COLON:
            self._key = json.loads(self._member)
        return expect is not Expect.COMMA_OR_END or self._key != "name" or self._take_name()

    def _take_name(self) -> bool:
        name = json.loads(self._member)
        if self.name is not None or name not in self._names:
            return False
        self.name = name
        return True
