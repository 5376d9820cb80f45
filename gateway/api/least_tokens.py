"""How much a request asks for at the least, seen from its JSON alone."""

from __future__ import annotations

from typing import Any

from .errors import ApiError
from .json_body import load_object


def least_tokens(body: bytes) -> int:
    """The fewest tokens (prompts and longest answers) that a request with this body can come to, without tokenising
    it. 0 for a body that is wrong: what is wrong with it is the parser's to say."""
    try:
        fields = load_object(body)
    except ApiError:
        return 0
    num_prompts, prompt_tokens = _prompts(fields.get("prompt"))
    choices = fields.get("n", 1)
    longest = fields.get("max_completion_tokens", fields.get("max_tokens", 1))
    if not all(isinstance(number, int) and number > 0 for number in (choices, longest)):
        return 0
    return int(prompt_tokens + num_prompts * choices * longest)


def _prompts(prompt: Any) -> tuple[int, int]:
    """How many there are, and of how many tokens they are at the least. Token ids are counted, texts are not."""
    if not isinstance(prompt, list) or not prompt:
        return 1, 1
    if isinstance(prompt[0], list):
        return len(prompt), sum(len(ids) for ids in prompt if isinstance(ids, list))
    if isinstance(prompt[0], str):
        return len(prompt), len(prompt)
    return 1, len(prompt)
