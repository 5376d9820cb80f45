"""Text in and out: prompts become token ids once, and tokens become text as they arrive.

`Tokenizer` gives the ids that Hugging Face's `tokenizer(text)` and `apply_chat_template` give: special tokens that
stand in the text are parsed as such, and the BOS that a chat template writes is not doubled. `ChoiceText` is the
text of one choice while it grows.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import normalizers

from ...transfer.errors import CheckpointError, ConfigError, UnsupportedModel
from ...transfer.messages import Finish
from .chat_output import PLAIN_STYLE, ChatStyle
from .detokenize import (
    BYTE_TOKEN,
    ByteLevelText,
    LocalText,
    MarkedText,
    TokenText,
    WindowText,
    byte_level_bytes,
    decoder_kind,
    decoder_steps,
)
from .errors import invalid
from .stop_strings import StopScanner
from .template_traits import template_traits

log = logging.getLogger(__name__)

COMPOSED_CHARS = 8  # that NFC may make one of, generously


@dataclass(frozen=True)
class TextOptions:
    """How one choice's tokens become text. `stop` strings (none empty) end it; `include_stop` keeps the stop string,
    or the text of the token that stopped it. Stop strings completed by the first `min_tokens` tokens do not count.
    `markers` are special tokens that are text even where special tokens are skipped."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    markers: tuple[str, ...] = ()


class Tokenizer:
    """One model's tokenizer and chat template; every method may be called from any thread.

    Thread safety: nothing here changes the tokenizer after construction. (A fast tokenizer raises "Already borrowed"
    when one thread changes its truncation or padding while another encodes; the first call below settles both.)
    """

    def __init__(
        self,
        path: Path,
        *,
        chat_template_file: Path | None = None,
        trust_remote_code: bool = False,
        style: ChatStyle = PLAIN_STYLE,
    ) -> None:
        """Raises ConfigError (or a subclass) when the tokenizer or the template file cannot be used."""
        # Here and not above: importing transformers takes seconds, which `--help` and a bad flag need not wait for.
        from transformers import AutoTokenizer

        try:
            # Any: transformers does not say what class comes back.
            self._hf: Any = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:  # whatever a broken file makes of it, the user gets one line
            raise CheckpointError(f"cannot load the tokenizer in {path}: {_one_line(error)}") from error
        if not self._hf.is_fast:
            raise UnsupportedModel(f"{type(self._hf).__name__} has no fast (tokenizers) version")
        if chat_template_file is not None:
            self._hf.chat_template = _read_template(chat_template_file)
        self.style = style
        self._reserved_kwargs = _reserved_template_kwargs(self._hf)
        self._backend: Any = self._hf.backend_tokenizer
        self.encode("a")  # settles truncation and padding, see above
        self.vocab_size = _vocab_size(path, len(self._hf))
        self._special_ids = frozenset(
            token for token, added in self._backend.get_added_tokens_decoder().items() if added.special
        )
        steps = decoder_steps(self._backend.decoder)
        self._kind = decoder_kind(steps)
        self._byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
        self._anchor = self._find_anchor() if self._kind == "local" else None
        self.template = template_traits(self._probe_template)
        self._chars_per_token = self._most_chars_per_token()

    @property
    def template_text(self) -> str:
        """The chat template's source ("None" when there is none)."""
        return str(self._hf.chat_template)

    def _probe_template(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str | None:
        if self._hf.chat_template is None:
            return None
        try:
            text: str = self._hf.apply_chat_template(list(messages), tools=tools, tokenize=False)
        except Exception as error:  # it is foreign code, and whether it takes such messages is what is to be found out
            log.debug("the chat template refuses a probe: %s", error)
            return None
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids as `tokenizer(text).input_ids`: with BOS when the model wants one."""
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._hf(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return ids

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids as `apply_chat_template(messages, tokenize=True)`. Raises ApiError 400 naming the field, also when
        they are sure to be more than `max_tokens`."""
        if self._hf.chat_template is None:
            raise invalid("This model has no chat template; use --chat-template or /v1/completions.", "messages")
        kwargs = template_kwargs or {}
        for name in kwargs:
            if name in self._reserved_kwargs:
                raise invalid(f"{name!r:.100} cannot be set here.", f"chat_template_kwargs.{name:.100}")
        try:
            text: str = self._hf.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except Exception as error:  # a template is foreign code and may raise anything on messages it did not expect
            raise invalid(f"The chat template refused the messages: {_one_line(error)}", "messages") from error
        if max_tokens is not None:
            self.require_fit(text, max_tokens, "messages")
        # The template writes the special tokens itself: adding them here, too, doubles BOS.
        return self._encode(text, add_special_tokens)

    def knows_role(self, role: str) -> bool:
        """Does the chat template name this role?"""
        return role in self.template_text

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`; `clean_up_tokenization_spaces` is off here and everywhere."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, text: str) -> int | None:
        """The id of the token that is exactly this in the vocabulary."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Each token's entry in the vocabulary; "" where the vocabulary has none."""
        return [self._backend.id_to_token(token) or "" for token in ids]

    def token_bytes(self, token: int, *, skip_special_tokens: bool) -> bytes | None:
        """What one token puts into a text that has begun; None when it puts nothing there."""
        piece = self._piece_lookup(skip_special_tokens)(token)
        if piece is None:
            return None
        if self._kind == "byte_level":
            return byte_level_bytes(piece)
        if self._byte_tokens and BYTE_TOKEN.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        if self._anchor is None:
            return self.decode([token], skip_special_tokens=False).encode()
        before = len(self.decode([self._anchor], skip_special_tokens=False))
        return self.decode([self._anchor, token], skip_special_tokens=False)[before:].encode()

    def incremental(self, *, skip_special_tokens: bool, markers: Sequence[str] = ()) -> TokenText:
        """A fresh incremental decoder whose pieces add up to `decode` of the same ids. Tokens that are one of
        `markers` are text in any case."""
        plain = self._incremental(skip_special_tokens)
        marked = {token: marker for marker in markers if (token := self._backend.token_to_id(marker)) is not None}
        return MarkedText(plain, marked) if marked else plain

    def _incremental(self, skip_special_tokens: bool) -> TokenText:

        def decode(ids: Sequence[int]) -> str:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)

        piece_of = self._piece_lookup(skip_special_tokens)
        if self._kind == "byte_level":
            return ByteLevelText(lambda token: byte_level_bytes(piece_of(token) or ""))
        if self._anchor is not None:
            return LocalText(decode, piece_of, self._byte_tokens, self._anchor)
        return WindowText(decode, piece_of)

    def _piece_lookup(self, skip_special_tokens: bool) -> Callable[[int], str | None]:
        """A token's vocabulary entry; None when `decode` passes the token over."""
        hidden = self._special_ids if skip_special_tokens else frozenset[int]()
        id_to_token: Callable[[int], str | None] = self._backend.id_to_token
        return lambda token: None if token in hidden else id_to_token(token)

    def require_fit(self, text: str, max_tokens: int, param: str) -> None:
        """Refuse a text that comes to more than `max_tokens` whatever is in it: reading it as tokens takes seconds for
        a few megabytes. Raises ApiError 400 naming `param`."""
        if self._chars_per_token is not None and len(text) > max_tokens * self._chars_per_token:
            raise invalid(
                f"This model's maximum context length is {max_tokens} tokens, and {len(text)} characters are more.",
                param,
                "context_length_exceeded",
            )

    def _most_chars_per_token(self) -> int | None:
        """The most characters of a text that one token can stand for; None where nothing bounds them."""
        if self._kind != "byte_level" or type(self._backend.model).__name__ != "BPE":
            return None  # an unknown word may be one token, however long, or none
        if any(added.lstrip or added.rstrip for added in self._backend.get_added_tokens_decoder().values()):
            return None  # takes all the space around it in
        longest = max(map(len, self._backend.get_vocab()))
        match self._backend.normalizer:
            case None:
                return longest
            case normalizers.NFC():
                return longest * COMPOSED_CHARS
            case _:
                return None

    def _find_anchor(self) -> int | None:
        """A token whose text is plain letters also when it stands alone."""
        for token in range(self._backend.get_vocab_size()):
            piece = self._backend.id_to_token(token)
            if piece is None or token in self._special_ids or BYTE_TOKEN.fullmatch(piece):
                continue
            text = self.decode([token], skip_special_tokens=True)
            if text.isascii() and text.isalnum():
                return token
        return None


class ChoiceText:
    """The text of one choice as its tokens arrive.

    The concatenation of what `push` returns equals `decode` of the tokens, cut at the first stop string; no piece
    holds half a character or the beginning of a stop string. `stopped` is the stop string that ended the text (the
    finish reason is "stop" then, and no token may be pushed any more). `num_tokens` counts all tokens pushed,
    `num_chars` the characters they have come to, `shown_chars` those that may be shown.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._options = options
        self._tokens = tokenizer.incremental(skip_special_tokens=options.skip_special_tokens, markers=options.markers)
        self._stops = StopScanner(options.stop, options.include_stop)
        self._finished = False
        self.num_tokens = 0
        self.num_chars = 0
        self.shown_chars = 0

    @property
    def pending(self) -> bool:
        """Does a token wait for the next ones to become text?"""
        return self._tokens.pending

    @property
    def stopped(self) -> str | None:
        return self._stops.stopped

    def push(self, token: int, finish: Finish) -> str:
        """The text that may be shown now. With a finish reason everything that was held back comes out; a token that
        finished by "stop" (EOS, stop_token_ids) has no text of its own unless `include_stop`."""
        assert not self._finished, "no token follows the one that finished a choice"
        self.num_tokens += 1
        hidden = finish == "stop" and not self._options.include_stop
        text = "" if hidden else self._tokens.push(token)
        if finish:
            text += self._tokens.flush()
        shown = self._feed(text, final=bool(finish))
        self._finished = bool(finish) or self.stopped is not None
        return shown

    def end(self) -> str:
        """What was held back, when the token pushed last turns out, afterwards, to have been the final one."""
        assert not self._finished
        self._finished = True
        return self._feed(self._tokens.flush(), final=True)

    def _feed(self, text: str, *, final: bool) -> str:
        may_stop = self.num_tokens > self._options.min_tokens
        shown = self._stops.feed(text, final=final, may_stop=may_stop)
        self.num_chars += len(text)
        self.shown_chars += len(shown)
        return shown


def _one_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:500]


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {path}: {_one_line(error)}") from error


def _reserved_template_kwargs(hf: Any) -> frozenset[str]:
    """Names that are parameters of the rendering call and so never reach the template as variables."""
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {"self", "messages"}
    for function in (type(hf).apply_chat_template, render_jinja_template):
        names.update(inspect.signature(function).parameters)
    return frozenset(names - {"documents", "kwargs"})


def _vocab_size(path: Path, tokenizer_size: int) -> int:
    """Rows of the model's embedding: ids from there on cannot be computed. The tokenizer's size without a config."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return tokenizer_size
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path / 'config.json'}: {_one_line(error)}") from error
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return tokenizer_size
