"""What in a regular expression the compiler of grammars would read as something else.

All of a text must match, so an anchor at the beginning or the end says nothing new. Anywhere else it could not match,
but the compiler passes over it; and of an escape that it does not know it passes over the backslash. What it refuses
by itself (look-around, back-references, word boundaries, flags) is not looked for here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

QUANTIFIERS = tuple("*+?{")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}|c[A-Za-z]|(.))", re.DOTALL)
KNOWN_LETTERS = frozenset("dDwWsSnrtfvea0")
REFUSED_OUTSIDE = frozenset("bBpPk123456789")  # by the compiler, but not within brackets
GROUP_PREFIX = re.compile(r"\((?:\?(?::|P?<[A-Za-z_]\w*>))?")
SURROGATES = range(0xD800, 0xE000)


class Misread(ValueError):
    """Says what, and where."""


@dataclass
class _Group:
    at_start: bool  # can nothing stand before it?
    anchored: bool = False  # does it hold an anchor?
    must_end: bool = False  # may only the end of all follow?
    some_must_end: bool = False  # may only that follow one of its alternatives?


def misread_in(pattern: str) -> str:
    """The first such thing with its place; "" if there is none."""
    try:
        _Reader(pattern).read()
    except Misread as found:
        return str(found)
    return ""


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._groups = [_Group(at_start=True)]
        self._at_start = True  # can nothing stand before what comes now?

    def read(self) -> None:
        at = 0
        while at < len(self._pattern):
            char = self._pattern[at]
            if self._groups[-1].must_end and char not in ")|$":
                raise Misread(f"position {at}: nothing can match behind a $")
            at = self._step(at, char)

    def _step(self, at: int, char: str) -> int:
        """Take one element in. Returns where the next one begins."""
        group = self._groups[-1]
        match char:
            case "(":
                self._groups.append(_Group(self._at_start))
                found = GROUP_PREFIX.match(self._pattern, at)
                return found.end() if found else at + 1
            case ")" if len(self._groups) > 1:
                self._close(at)
            case "|":
                group.some_must_end |= group.must_end
                group.must_end, self._at_start = False, group.at_start
            case "^" | "$":
                self._anchor(at, char)
            case _:
                self._at_start = False
                if char == "\\":
                    return self._escape(at, within=False)[0]
                if char == "[":
                    return self._brackets(at)
        return at + 1

    def _anchor(self, at: int, char: str) -> None:
        group = self._groups[-1]
        group.anchored = True
        if self._pattern.startswith(QUANTIFIERS, at + 1):
            raise Misread(f"position {at}: {char} cannot be repeated")
        if char == "$":
            group.must_end = True
        elif not self._at_start:
            raise Misread(f"position {at}: ^ can only stand at the beginning")

    def _close(self, at: int) -> None:
        inner = self._groups.pop()
        outer = self._groups[-1]
        if inner.anchored and self._pattern.startswith(QUANTIFIERS, at + 1):
            raise Misread(f"position {at}: what holds an anchor cannot be repeated")
        outer.anchored |= inner.anchored
        outer.must_end |= inner.must_end or inner.some_must_end
        self._at_start = False

    def _brackets(self, at: int) -> int:
        """A character class."""
        at += 1
        first = at
        if self._pattern.startswith("^", at):
            at += 1
            first = -1  # a second one is a character like others
        while at < len(self._pattern) and self._pattern[at] != "]":
            if self._pattern[at] != "\\":
                at += 1
                continue
            behind, char = self._escape(at, within=True)
            if char == "^" and at == first:
                raise Misread(f"position {at}: an escaped ^ cannot be the first in brackets")
            at = behind
        return at + 1

    def _escape(self, at: int, *, within: bool) -> tuple[int, str]:
        """Where an escape ends, and the character that it stands for ("" if it is a class of them)."""
        found = _ESCAPE.match(self._pattern, at)
        if found is None:  # the compiler's to refuse
            return at + 1, ""
        code = next((int(digits, 16) for digits in found.groups()[:3] if digits), None)
        letter = found.group(4) or ""
        if code is not None:
            if code in SURROGATES or code > 0x10FFFF:
                raise Misread(f"position {at}: {found.group()} is no character")
            return found.end(), chr(code)
        known = letter in KNOWN_LETTERS or (letter in REFUSED_OUTSIDE and not within) or (letter == "b" and within)
        if letter.isascii() and letter.isalnum() and not known:
            raise Misread(f"position {at}: the escape {found.group()} is not known")
        return found.end(), letter
