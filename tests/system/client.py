"""A small blocking client of the HTTP surface; every call has a deadline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 900.0


@dataclass
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """What a request gave, whether it came at once or as a stream."""

    choices: list[Choice]
    prompt_token_ids: list[int]
    usage: dict[str, Any]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason


class Refused(Exception):
    """An answer that is not 200."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.status_code}: {response.text[:500]}")
        self.status = response.status_code
        self.headers = response.headers
        self.body: dict[str, Any] = response.json()

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice of any of the four shapes (chat or completion, whole or chunk)."""
    part = choice.get("message") or choice.get("delta")
    return (part.get("content") if part is not None else choice.get("text")) or ""


def _collect(bodies: list[dict[str, Any]]) -> Answer:
    choices: dict[int, Choice] = {}
    prompt: list[int] = []
    usage: dict[str, Any] = {}
    for body in bodies:
        usage = body.get("usage") or usage
        prompt = body.get("prompt_token_ids") or prompt
        for item in body["choices"]:
            choice = choices.setdefault(item["index"], Choice())
            choice.text += _text(item)
            choice.token_ids += item.get("token_ids") or []
            choice.finish_reason = item["finish_reason"] or choice.finish_reason
            prompt = item.get("prompt_token_ids") or prompt
    return Answer([choices[index] for index in sorted(choices)], prompt, usage)


class Client:
    """Talks to one gateway about one model."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        self._http = httpx.Client(
            base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=httpx.Limits(max_connections=None)
        )

    def use_key(self, key: str) -> None:
        """Send this API key from now on."""
        self._http.headers["Authorization"] = f"Bearer {key}"

    def close(self) -> None:
        self._http.close()

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(path, json={"model": self.model, **body})

    def _ask(self, path: str, body: dict[str, Any]) -> Answer:
        response = self.post(path, {"return_token_ids": True, **body})
        if response.status_code != 200:
            raise Refused(response)
        return _collect([response.json()])

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> Answer:
        return self._ask("/v1/chat/completions", {"messages": messages, **fields})

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Answer:
        """Raises Refused for an answer that is not 200."""
        text_or_ids = prompt if isinstance(prompt, str) else list(prompt)
        return self._ask("/v1/completions", {"prompt": text_or_ids, **fields})

    @contextmanager
    def events(self, path: str, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The chunks of a stream as they come; leaving the block early disconnects. Raises Refused."""
        body = {"model": self.model, "stream": True, "return_token_ids": True, **fields}
        with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise Refused(response)
            yield _events(response)

    def stream(self, path: str, **fields: Any) -> Answer:
        """A whole stream, collected."""
        fields = {"stream_options": {"include_usage": True}, **fields}
        with self.events(path, **fields) as events:
            return _collect(list(events))


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Chunks of an SSE body. AssertionError when it does not end in [DONE], or carries an error."""
    for line in response.iter_lines():
        if not line.startswith("data: "):
            assert not line or line.startswith(":"), f"not an SSE line: {line!r}"
            continue
        if line == "data: [DONE]":
            return
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        assert "error" not in event, f"error in the stream: {event}"
        yield event
    raise AssertionError("the stream ended without [DONE]")
