"""Incremental decoding: token by token, yet the pieces add up to `decode(all ids)` for every sequence of ids.

Which text a token adds depends on the tokenizer's decoder. Three kinds cover all of them:

* `ByteLevelText` (GPT-2, Llama 3, Qwen, SmolLM …): tokens are bytes, and decoding is UTF-8 over their concatenation.
  An incremental UTF-8 decoder is the same thing, piece by piece.
* `LocalText` (SentencePiece-like: Llama 2, Mistral, Gemma, Phi-3, T5; WordPiece): a token's text depends on the token,
  on whether it is the first, and, for byte tokens such as `<0xE4>`, on the whole run of byte tokens around it: one
  invalid byte turns *every* byte of its run into U+FFFD. So a run is held back until it ends.
* `WindowText` (anything else): a token's text is what it adds behind its predecessor; checked against the whole at
  the end.

Each costs O(1) a token, however long the text is. All decode without `clean_up_tokenization_spaces`.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

Decode = Callable[[Sequence[int]], str]
DecoderKind = Literal["byte_level", "local", "other"]

REPLACEMENT = "\ufffd"
WINDOW_TOKENS = 8  # a character is at most 4 bytes; twice that many tokens cannot be half of one

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

log = logging.getLogger(__name__)


class TokenText(Protocol):
    """Text of a growing sequence of tokens."""

    @property
    def pending(self) -> bool:
        """Is text of tokens that were pushed still to come?"""

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""

    def flush(self) -> str:
        """What is left when no token follows. Tokens that do follow are decoded as if they stood alone, at most."""


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the other 68 for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    table.update({chr(256 + i): byte for i, byte in enumerate(list(others))})
    return table


_BYTE_OF_CHAR = _byte_of_char()


def byte_level_bytes(piece: str) -> bytes:
    """The bytes a ByteLevel token stands for; one with a foreign character (an added token) stands for itself."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()


class ByteLevelText:
    """`bytes_of` gives a token's bytes, b"" for one that is skipped."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, token: int) -> str:
        return self._utf8.decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class LocalText:
    """`piece_of` gives a token's vocabulary entry, None for one that is skipped. `anchor` is a token whose text is a
    letter: behind it a token is not the first, and nothing can strip its leading space."""

    def __init__(self, decode: Decode, piece_of: Callable[[int], str | None], byte_tokens: bool, anchor: int) -> None:
        self._decode = decode
        self._piece_of = piece_of
        self._byte_tokens = byte_tokens
        self._anchor = anchor
        self._anchor_len = len(decode([anchor]))
        self._head: list[int] = []  # tokens so far, while there is no text yet
        self._started = False
        self._run: list[int] = []

    @property
    def pending(self) -> bool:
        return bool(self._run)

    def push(self, token: int) -> str:
        piece = self._piece_of(token)
        if piece is None:
            return ""
        if self._byte_tokens and BYTE_TOKEN.fullmatch(piece):
            self._run.append(token)
            return ""
        return self.flush() + self._add([token])

    def flush(self) -> str:
        if not self._run:
            return ""
        run, self._run = self._run, []
        return self._add(run)

    def _add(self, tokens: list[int]) -> str:
        if self._started:
            return self._decode([self._anchor, *tokens])[self._anchor_len :]
        self._head += tokens
        text = self._decode(self._head)
        self._started = bool(text)
        return text


class WindowText:
    """Best effort for an unknown decoder: a token's text is what it adds behind the tokens of the piece before.

    Where that fails (the text before changes) the rest is held back to the end, where `flush` decodes everything once.
    """

    def __init__(self, decode: Decode, piece_of: Callable[[int], str | None]) -> None:
        self._decode = decode
        self._piece_of = piece_of
        self._all: list[int] = []
        self._shown: list[str] = []
        self._before: list[int] = []
        self._window: list[int] = []
        self._holding = False

    @property
    def pending(self) -> bool:
        return bool(self._window) or self._holding

    def push(self, token: int) -> str:
        if self._piece_of(token) is None:
            return ""
        self._all.append(token)
        if self._holding:
            return ""
        self._window.append(token)
        before = self._decode(self._before)
        text = self._decode(self._before + self._window)
        self._holding = not text.startswith(before)
        full = len(self._window) >= WINDOW_TOKENS
        if self._holding or (text.endswith(REPLACEMENT) and not full):
            return ""
        new = text[len(before) :]
        if new:
            self._before, self._window = self._window, []
            self._shown.append(new)
        elif full:  # tokens without text: what stands before them is still the better context
            self._window = []
        return new

    def flush(self) -> str:
        shown, whole = "".join(self._shown), self._decode(self._all)
        self._all, self._shown, self._before, self._window, self._holding = [], [], [], [], False
        if whole.startswith(shown):
            return whole[len(shown) :]
        log.warning("the tokenizer's decoder is not incremental: streamed text differs from the whole text")
        return ""


class MarkedText:
    """`text`, but the tokens of `markers` are those markers, whatever `text` would make of them."""

    def __init__(self, text: TokenText, markers: Mapping[int, str]) -> None:
        self._text = text
        self._markers = markers

    @property
    def pending(self) -> bool:
        return self._text.pending

    def push(self, token: int) -> str:
        marker = self._markers.get(token)
        return self._text.push(token) if marker is None else self._text.flush() + marker

    def flush(self) -> str:
        return self._text.flush()


def decoder_steps(decoder: Any) -> list[Mapping[str, Any]]:  # Any: `tokenizers` has no type for a decoder's state
    """The chain of a `tokenizers` decoder, nested sequences unfolded; [] when there is none."""
    if decoder is None:
        return []
    return list(_unfold(json.loads(decoder.__getstate__())))


def _unfold(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if step["type"] == "Sequence":
        for inner in step["decoders"]:
            yield from _unfold(inner)
    else:
        yield step


def decoder_kind(steps: Sequence[Mapping[str, Any]]) -> DecoderKind:
    """Which of the three classes decodes this chain."""
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return "byte_level"
    fused = False
    for step in steps:
        match step["type"]:
            case "Fuse":
                fused = True
            case "Strip" if not fused or step["stop"] == 0:
                pass
            case "Replace" if not fused and "String" in step["pattern"]:
                pass
            case "Metaspace" | "ByteFallback" | "WordPiece" if not fused:
                pass
            case _:
                return "other"
    return "local"
