"""Whose prompt is computed next, in the gateway's queue as at a prefill worker: the shortest, with ageing; and how much
of it at once. Torch-free.

All that wait age alike, so the difference between two ranks never changes: a rank can be kept in a heap.
"""

from __future__ import annotations

AGEING_TOKENS_PER_S = 200.0  # a second of waiting outweighs this many tokens of length
STEP_S = 0.15  # how long a step should take at most: whoever comes meanwhile waits for its end
LEAST_STEP_TOKENS = 64  # fewer cost more each, and a step has some fixed cost
PRIORITY_TOKENS = 2000.0  # one priority level outweighs this many tokens of length: 10 s of waiting


def length_tokens(missing_tokens: int, priority: int) -> float:
    """What is to be computed of a prompt, moved by its priority. Shorter goes first."""
    return missing_tokens + priority * PRIORITY_TOKENS


def rank_tokens(missing_tokens: int, came_at_s: float, priority: int) -> float:
    """The same with ageing; lower goes first. `came_at_s`: on any one clock."""
    return length_tokens(missing_tokens, priority) + came_at_s * AGEING_TOKENS_PER_S


def step_tokens(most: int, tokens_per_s: float | None) -> int:
    """Of prompts in one step, where others may come at any time; `most` while no speed is known."""
    if tokens_per_s is None:
        return most
    return min(most, max(LEAST_STEP_TOKENS, int(tokens_per_s * STEP_S)))
