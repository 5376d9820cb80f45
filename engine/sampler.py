"""From logits to the next token of every row.

Order of the steps, the one users of the OpenAI API and of vLLM expect:

    grammar → logit bias → min_tokens → repetition, frequency, presence penalty → temperature → top-k → top-p → min-p
    → draw

With temperature 0 the draw is an argmax after the penalties (the first of equals). Otherwise it is the Gumbel-max
trick: the token is argmax over the surviving ids i of `score[i] / temperature + g[i]`, with

    g[i] = -log(-log(u[i])),   u[i] = ((raw[i] >> 12) + 1/2) / 2^52    (exact, never 0 or 1)
    raw[i] = word i % 4 of Philox4x64-10(key = (seed, choice), counter = (1 + i // 4, 0, 0, position))

and `position = len(output)`. So the noise is a function of (seed, choice, position) and the token id alone: not of the
other rows, of what was sampled before, or of which worker samples. Raw words are used because NumPy guarantees the
stream of a bit generator, but not that of `Generator.random`, across versions. Each row is computed by itself in
float64 on the host, so a token never depends on the batch it was sampled in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.greedy import largest
from ..transfer.sampling_params import SamplingParams

NOT_FINITE = -1
"""Stands for the token of a row whose logits hold NaN or +inf, or nothing but -inf."""

HEAD_OF_DISTRIBUTION = np.exp(-12.0)  # relative to the most probable token
ROUNDING = 1e-9  # far above the error of a logarithm, far below what would let many ids through

_LARGEST_SCORE = 1e300  # extreme penalties may overflow; differences of scores must stay representable

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class SampleRow:
    """One choice that needs its next token: token number `len(output)` of choice `choice`.

    `mask`, if there is a grammar: bit i of byte i // 8, lowest first, says whether token i may be chosen. At least one.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    choice: int
    mask: bytes | None = None


def sample(
    logits: Tensor,  # [rows, vocab] float32
    rows: Sequence[SampleRow],
    eos_token_ids: frozenset[int],
) -> list[int]:
    """The next token of every row, in order; `NOT_FINITE` for a row whose logits are unusable.

    Such a row fails alone: its neighbours get the tokens they would get without it.
    """
    assert logits.shape[:1] == (len(rows),), f"{tuple(logits.shape)} logits for {len(rows)} rows"
    if not rows:
        return []
    logits = constrained(logits, [row.mask for row in rows])
    most, greedy = largest(logits)  # NaN wins over everything, so one look at the maximum finds it
    usable = [math.isfinite(value) for value in most]
    tokens = [token if is_usable else NOT_FINITE for token, is_usable in zip(greedy, usable, strict=True)]
    worked = [i for i, row in enumerate(rows) if usable[i] and not _is_plain_greedy(row)]
    if worked:
        scores: Floats = logits[worked].cpu().double().numpy()
        for i, row_scores in zip(worked, scores, strict=True):
            tokens[i] = _sample_row(row_scores, rows[i], eos_token_ids, tokens[i])
    return tokens


def constrained(
    logits: Tensor,  # [rows, vocab]
    masks: Sequence[bytes | None],
) -> Tensor:  # [rows, vocab]
    """The logits with -inf for every token that its row's mask rules out. A NaN stays: its row is unusable."""
    masked = [i for i, mask in enumerate(masks) if mask is not None]
    if not masked:
        return logits
    packed = np.frombuffer(b"".join(masks[i] or b"" for i in masked), dtype=np.uint8).reshape(len(masked), -1)
    allowed = torch.from_numpy(np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little"))
    barred = allowed.to(logits.device) == 0
    logits = logits.clone()
    logits[masked] = logits[masked].masked_fill(barred & ~logits[masked].isnan(), -torch.inf)
    return logits


def _is_plain_greedy(row: SampleRow) -> bool:
    """Whether nothing stands between this row's logits and their argmax."""
    params = row.params
    return params.temperature == 0 and not params.logit_bias and not _bars_eos(row) and not _has_penalties(params)


def _bars_eos(row: SampleRow) -> bool:
    """Whether tokens that would end the choice are barred, as far as something else may be chosen."""
    params = row.params
    return len(row.output) < params.min_tokens or (params.ignore_eos and params.grammar is not None)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _sample_row(
    scores: Floats,  # [vocab], changed in place
    row: SampleRow,
    eos_token_ids: frozenset[int],
    argmax: int,
) -> int:
    """The token of one row whose untouched scores have their maximum at `argmax`."""
    params = row.params
    _add_bias(scores, params.logit_bias)
    if _bars_eos(row):
        early = len(row.output) < params.min_tokens
        barred = set(params.stop_token_ids) if early else set[int]()
        if params.grammar is not None or not params.ignore_eos:
            barred |= eos_token_ids
        scores[_known_ids(barred, len(scores))] = -np.inf
    if _has_penalties(params):
        _apply_penalties(scores, row)
    best = int(scores.argmax())
    if scores[best] == -np.inf:  # all that a grammar allows, or the whole vocabulary, is barred: take it all the same
        return argmax
    if params.temperature == 0:
        return best
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, which is what it means
        scores -= scores[best]
        scores /= params.temperature
    ids = survivors(scores, params.top_k, params.top_p, params.min_p)
    return _draw(scores, ids, noise_words(params.seed, row.choice, len(row.output), len(scores)))


def _known_ids(ids: Iterable[int], vocab_size: int) -> Ids:
    """`ids` as an index, without those the model has no logit for."""
    array = np.fromiter(ids, dtype=np.int64)
    return array[array < vocab_size]


def _add_bias(scores: Floats, bias: dict[int, float]) -> None:
    for token, value in bias.items():
        if token < len(scores):
            scores[token] += value


def _apply_penalties(scores: Floats, row: SampleRow) -> None:
    """Repetition over prompt and output; frequency and presence over the output only, as OpenAI defines them."""
    params = row.params
    counts = np.bincount(_known_ids(row.output, len(scores)), minlength=len(scores))
    with np.errstate(over="ignore"):
        if params.repetition_penalty != 1:
            seen = counts > 0
            seen[_known_ids(row.prompt, len(scores))] = True
            penalised = scores[seen]
            scores[seen] = np.where(
                penalised > 0, penalised / params.repetition_penalty, penalised * params.repetition_penalty
            )
        scores -= params.frequency_penalty * counts
        scores -= params.presence_penalty * (counts > 0)
    np.minimum(scores, _LARGEST_SCORE, out=scores)


def survivors(
    scores: Floats,  # [vocab], after temperature, its maximum 0
    top_k: int,
    top_p: float,
    min_p: float,
) -> Ids:
    """Ids that may be drawn: top-k, of those the top-p nucleus, of those the ones min-p leaves. At least one.

    The nucleus is the smallest set of most probable tokens whose probabilities, renormalised over what top-k left,
    reach `top_p`. Among equal scores the lower id goes first, so exactly k tokens survive top-k.
    """
    ids: Ids = np.arange(len(scores))
    if 0 < top_k < len(ids):
        ids = _largest(scores, ids, top_k)
    if top_p < 1:
        ids = _nucleus(scores, ids, top_p)
    if min_p > 0:
        ids = ids[scores[ids] >= np.log(min_p)]
    return ids


def _nucleus(scores: Floats, ids: Ids, top_p: float) -> Ids:
    """The smallest set of the most probable of `ids` whose share of their probability reaches `top_p`."""
    weights = np.exp(scores[ids])
    wanted = top_p * weights.sum()
    head = np.flatnonzero(weights >= HEAD_OF_DISTRIBUTION)  # usually enough, and cheaper to sort than a vocabulary
    if weights[head].sum() >= wanted:
        ids, weights = ids[head], weights[head]
    mass = np.sort(weights)[::-1].cumsum()
    return _largest(scores, ids, int(mass.searchsorted(wanted)) + 1)


def _largest(scores: Floats, ids: Ids, count: int) -> Ids:
    """The `count` of `ids` (ascending) with the largest scores, ascending; of equals the lower ids."""
    if count >= len(ids):
        return ids
    values = scores[ids]
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    chosen = values > threshold
    equals = np.flatnonzero(values == threshold)
    chosen[equals[: count - int(chosen.sum())]] = True
    left: Ids = ids[np.flatnonzero(chosen)]  # several times faster than indexing by the mask itself
    return left


def noise_words(seed: int, choice: int, position: int, vocab_size: int) -> Words:
    """One random word for every token id at one position of one choice (formula: top of this file)."""
    counter = np.array([0, 0, 0, position], dtype=np.uint64)
    philox = np.random.Philox(key=np.array([seed, choice], dtype=np.uint64), counter=counter)
    words: Words = np.asarray(philox.random_raw(vocab_size), dtype=np.uint64)
    return words


def gumbel(words: Words) -> Floats:
    """Standard Gumbel noise, rising with the word; always finite."""
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def _draw(scores: Floats, ids: Ids, words: Words) -> int:
    """The one of `ids` with the largest score + noise.

    Most logarithms are saved: an id whose score, with the largest noise of all, stays below what the best-scored id
    reaches cannot win.
    """
    values, words = scores[ids], words[ids]
    best = values.argmax()
    reached = values[best] + gumbel(words[best : best + 1])[0]
    most = gumbel(words.max(keepdims=True))[0]
    able = np.flatnonzero(values >= reached - most - ROUNDING)
    return int(ids[able[(values[able] + gumbel(words[able])).argmax()]])
