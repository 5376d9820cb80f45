"""From accepted tokens to what the client gets: text per choice, then either one body or a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ..transfer.messages import Finish, TokenLogprobs
from .api.chat_output import ChatOutput, FinishReason, Message
from .api.logprobs import NONE, Entry, Logprobs
from .api.parsed_request import ParsedRequest
from .api.responses import ChoiceResult, StreamWriter, Usage, new_reply_id, whole_response
from .api.text import ChoiceText, Tokenizer

MAX_UNSENT_BYTES = 1024 * 1024  # events one connection may have waiting before its client counts as not reading
NO_USAGE = Usage(0, 0, 0)  # where the writer is known not to look at it


class SlowReader(Exception):
    """The client takes its events so slowly that the gateway will not keep more of them."""


class EventBuffer:
    """Bytes on their way to one connection. Never makes the producer wait: decode is not to feel a slow client."""

    def __init__(self, max_bytes: int = MAX_UNSENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, events: bytes) -> None:
        """Raises SlowReader when too much is waiting already."""
        if not events:
            return
        self._num_bytes += len(events)
        if self._num_bytes > self._max_bytes:
            raise SlowReader(f"{self._num_bytes} bytes are waiting to be read")
        self._chunks.append(events)
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def take_now(self) -> bytes:
        events = b"".join(self._chunks)
        self._chunks.clear()
        self._num_bytes = 0
        return events

    async def take(self) -> bytes:
        """Everything that is there, as soon as there is something; b"" at the end."""
        while not self._chunks and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        return self.take_now()


class Reply:
    """The answer to one HTTP request, as it grows. A `Sink` for all of its prompts (choices are prompt-major)."""

    def __init__(self, parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
        self._parsed = parsed
        self._id = new_reply_id(parsed.kind)
        self._created = int(time.time())
        num_sampled = len(parsed.prompts) * parsed.num_sampled
        self._texts = [ChoiceText(tokenizer, parsed.text) for _ in range(num_sampled)]
        self._outputs = [ChatOutput(parsed.output) for _ in self._texts]
        self._messages = [Message() for _ in self._texts]
        self._token_ids: list[list[int]] = [[] for _ in self._texts]
        self._finishes: list[FinishReason] = [""] * num_sampled
        self._entries: list[list[Entry]] = [[] for _ in self._texts]
        self._logprobs = Logprobs(parsed, tokenizer)
        self._writer = StreamWriter(parsed, self._id, self._created, self._logprobs.of_prompt)
        self.events = EventBuffer(MAX_UNSENT_BYTES + self._logprobs.prompt_bytes)
        self.count_cached: Callable[[], int] = int  # prompt tokens found in caches; set once requests exist

    def prompt_logprobs(self, first_choice: int, entries: Sequence[TokenLogprobs]) -> None:
        """Take what is said of a prompt's tokens, before any token of its choices."""
        self._logprobs.prompt(first_choice, entries)

    def token(self, choice: int, token: int, finish: Finish, logprobs: TokenLogprobs | None) -> bool:
        """Take the next token of `choice`. True when it is over, be it through a stop string or its only call."""
        state = self._texts[choice]
        self._logprobs.add(choice, token, logprobs, state)
        text = state.push(token, finish)
        stopped = state.stopped is not None
        return self._show(choice, text, [token], "stop" if stopped else finish)

    def late_finish(self, choice: int, finish: Finish) -> None:
        """`choice` ended with the token taken last."""
        state = self._texts[choice]
        text = state.end()
        self._show(choice, text, [], "stop" if state.stopped is not None else finish)

    def _show(self, choice: int, text: str, token_ids: Sequence[int], finish: Finish) -> bool:
        """Take in new text. True when the choice is over."""
        output = self._outputs[choice]
        token_end = self._texts[choice].num_chars if token_ids else None
        delta = output.feed(text, token_end=token_end, final=bool(finish))
        if output.over:
            finish = finish or "stop"
        reason = self._finishes[choice] = output.finish_reason(finish)
        entries = self._logprobs.take(choice, self._texts[choice], over=bool(finish))
        if self._parsed.stream:
            usage = self.usage() if self._parsed.continuous_usage else NO_USAGE
            logprobs = self._logprobs.member(entries) if entries else NONE
            self.events.put(self._writer.delta(choice, delta.content, token_ids, reason, usage, delta, logprobs))
        else:
            self._messages[choice].add(delta)
            self._entries[choice] += entries
            self._token_ids[choice].extend(token_ids)
        return bool(finish)

    def usage(self) -> Usage:
        reasoning = None
        if self._parsed.output.reasoning is not None:
            reasoning = sum(output.reasoning_tokens for output in self._outputs)
        return Usage(self._parsed.prompt_tokens, self.completion_tokens, self.count_cached(), reasoning)

    @property
    def finishes(self) -> Sequence[FinishReason]:
        """Each choice's finish reason, "" while it has none."""
        return self._finishes

    @property
    def completion_tokens(self) -> int:
        return sum(text.num_tokens for text in self._texts)

    def end_stream(self) -> None:
        """Every choice has its finish reason: the usage chunk and the end mark."""
        self.events.put(self._writer.end(self.usage()))
        self.events.close()

    def body(self) -> bytes:
        """The answer as one JSON object."""
        results = [
            ChoiceResult(
                self._messages[choice].content,
                self._token_ids[choice],
                self._finishes[choice],
                self._messages[choice].reasoning,
                self._messages[choice].calls,
                self._logprobs.member(self._entries[choice]),
            )
            for choice in self._logprobs.best()
        ]
        asked = self._parsed.prompt_logprobs is not None
        said = [self._logprobs.of_prompt(number) for number in range(len(self._parsed.prompts))] if asked else []
        return whole_response(self._parsed, self._id, self._created, results, self.usage(), said)
