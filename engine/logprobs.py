"""Log probabilities: of tokens that were sampled, and of a prompt's own tokens.

They are the log-softmax of the model's raw logits: before bias, penalties, temperature, and whatever else decides what
may be drawn. Only rows that ask cost anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..transfer.messages import LEAST_LOGPROB, MAX_PROMPT_LOGPROBS, PromptLogprobs, TokenLogprobs
from ..transfer.sampling_params import SamplingParams
from .runner import Chunk, Runner
from .sampler import NOT_FINITE, SampleRow

ROWS_AT_ONCE = 64  # through the head when a prompt is scored: bounds the memory of their logits


def sampled_logprobs(
    logits: Tensor,  # [rows, vocab] float32, as the model gave them
    rows: Sequence[SampleRow],
    tokens: Sequence[int],  # what was sampled in each row
) -> list[TokenLogprobs | None]:
    """Those of the sampled tokens, None for rows that do not ask and for rows without a token."""
    found: list[TokenLogprobs | None] = [None] * len(rows)
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and tokens[i] != NOT_FINITE]
    if asked:
        tops = [rows[i].params.logprobs or 0 for i in asked]
        picked = logits if len(asked) == len(rows) else logits[asked]
        for i, entry in zip(asked, token_logprobs(picked, [tokens[i] for i in asked], tops), strict=True):
            found[i] = entry
    return found


@torch.inference_mode()
def token_logprobs(
    logits: Tensor,  # [rows, vocab] float32
    tokens: Sequence[int],  # one per row
    tops: Sequence[int],  # how many of the most likely tokens to name, per row
) -> list[TokenLogprobs | None]:
    """What each row says of its token; None for a row that holds NaN or +inf, or nothing but -inf."""
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])  # [rows, 1]
    total = logits.logsumexp(dim=-1, keepdim=True)
    ranks: list[int] = ((logits > chosen).sum(dim=-1) + 1).tolist()
    best = logits.topk(min(max(tops), logits.shape[-1]), dim=-1)
    usable: list[bool] = total.isfinite()[:, 0].tolist()
    own: list[float] = _bounded(chosen - total)[:, 0].tolist()
    ids: list[list[int]] = best.indices.tolist()
    values: list[list[float]] = _bounded(best.values - total).tolist()
    return [
        TokenLogprobs(own[row], ranks[row], list(zip(ids[row][:top], values[row][:top], strict=True)))
        if usable[row]
        else None
        for row, top in enumerate(tops)
    ]


def _bounded(logprobs: Tensor) -> Tensor:
    """What is impossible has a finite logarithm too, since JSON has no other; rounding must not pass certainty."""
    return logprobs.clamp(LEAST_LOGPROB, 0.0)


def prompt_targets(params: SamplingParams, prompt: Sequence[int], start: int, count: int) -> Sequence[int]:
    """The tokens to score behind tokens [start, start + count) of a sequence: those of its prompt, if it asks."""
    return () if params.prompt_logprobs is None else prompt[start + 1 : start + count + 1]


def score_prompts(
    runner: Runner, chunks: Sequence[Chunk], between: Callable[[], None]
) -> Iterator[list[TokenLogprobs] | None]:
    """For each chunk of the step just run, what the model said of its targets; None when that is not finite.

    `between` is called before every group of rows; what it raises comes out.
    """
    row = 0
    for chunk in chunks:
        entries: list[TokenLogprobs | None] = []
        for first in range(0, len(chunk.targets), ROWS_AT_ONCE):
            between()
            targets = chunk.targets[first : first + ROWS_AT_ONCE]
            logits = runner.head.logits(range(row + first, row + first + len(targets)))
            entries += token_logprobs(logits, targets, [chunk.top] * len(targets))
        row += len(chunk.token_ids)
        whole = [entry for entry in entries if entry is not None]
        yield whole if len(whole) == len(entries) else None
    runner.head.drop()


def prompt_messages(attempt: tuple[str, int], first: int, entries: list[TokenLogprobs]) -> Iterator[PromptLogprobs]:
    """What the gateway is told of the prompt's tokens from `first` on, in messages of bounded size."""
    for at in range(0, len(entries), MAX_PROMPT_LOGPROBS):
        yield PromptLogprobs(*attempt, first + at, entries[at : at + MAX_PROMPT_LOGPROBS])
