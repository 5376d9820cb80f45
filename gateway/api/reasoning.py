"""Reasoning and answer told apart in the text of a choice, as it grows.

`think`: what stands between `<think>` and `</think>` is reasoning, also when the chat template itself has opened it in
the prompt. The markers belong to neither, and nor does the whitespace that surrounds them.
"""

from __future__ import annotations

from typing import Literal

from .json_stream import WHITESPACE
from .stop_strings import open_start

ReasoningParserName = Literal["none", "think"]
Opened = Literal["no", "maybe", "yes"]
"""Is the text within reasoning where it begins? "no": and no reasoning will come; "maybe": a marker may come first."""

OPENING = "<think>"
CLOSING = "</think>"


def opened_by_prompt(prompt: str, *, continued: bool) -> Opened:
    """What the end of a rendered prompt says. `continued`: the model is to go on with a message that has begun, so
    reasoning that is open there may have text already."""
    opening, closing = prompt.rfind(OPENING), prompt.rfind(CLOSING)
    if opening > closing and (continued or not prompt[opening + len(OPENING) :].strip()):
        return "yes"
    return "no" if continued or prompt.rstrip().endswith(CLOSING) else "maybe"


class ReasoningSplitter:
    """`feed` takes text in and gives (reasoning, content) out. `ended_at`: how many characters of the text had come
    when the reasoning was over, its closing marker included; None before, or when there is no reasoning."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._inside = opened == "yes"
        self._held = ""
        self._num_chars = 0
        self._at_start = True  # of the reasoning, or of the content behind it: whitespace does not count here
        self.ended_at: int | None = None

    @property
    def inside(self) -> bool:
        return self._inside

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        self._num_chars += len(text)
        text, self._held = self._held + text, ""
        if self._opened == "maybe":
            start = text.lstrip(WHITESPACE)
            if OPENING.startswith(start) and start != OPENING and not final:
                self._held = text
                return "", ""
            self._inside = start.startswith(OPENING)
            self._opened = "yes" if self._inside else "no"
            if self._inside:
                text = start[len(OPENING) :]
        if self._inside:
            return self._in_reasoning(text, final)
        return "", self._content(text)

    def _in_reasoning(self, text: str, final: bool) -> tuple[str, str]:
        at = text.find(CLOSING)
        if at >= 0:
            behind = text[at + len(CLOSING) :]
            self._inside = False
            self.ended_at = self._num_chars - len(behind)
            reasoning = self._strip_start(text[:at]).rstrip(WHITESPACE)
            self._at_start = True
            return reasoning, self._content(behind)
        text = self._strip_start(text)
        shown = len(text) if final else len(text[: open_start(text, CLOSING)].rstrip(WHITESPACE))
        self._held = text[shown:]
        return text[:shown], ""

    def _content(self, text: str) -> str:
        return self._strip_start(text) if self.ended_at is not None else text

    def _strip_start(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip(WHITESPACE)
            self._at_start = not text
        return text
