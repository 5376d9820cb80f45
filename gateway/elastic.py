"""Who computes a prompt: a prefill worker, or the decode worker that will go on with it. Pure functions.

Each worker measures its own speed and reports it, so the time to a first token can be predicted for either. What it
costs prefill to send KV, and decode to take it in, is in prefill's speed; how long decode takes to answer with a
reservation is measured here. Whichever is faster gets the prompt; but of the decode workers only those may take it that
disturb nobody by that:

    idle         no stream flows there: it takes prompts whole
    within_slo   its operator allows steps of --itl-slo-ms, and a part of the prompt fits into those
    same_burst   every stream there began after this request had come, and one had a prompt as long: so it only has its
                 share of what came together

A prompt that has the machine to itself goes to decode if that is as fast: so it is never slower than if there were no
prefill worker, and that one is free for whoever comes next.

A stream that flows when a request comes is therefore not slowed by it, unless that was allowed in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..transfer.reports import Speed

CLEARLY_FASTER = 0.8  # decode helps only if it needs less than this part of prefill's time: the two are estimates
AS_FAST = 1.1  # and counts as fast as prefill up to this multiple of its time, where nothing else runs
NOMINAL_TOKENS_PER_S = 1000.0  # while nobody has measured anything: all are equally fast
BESIDE_SHARE = 0.5  # of its speed, while a decode worker has not measured what is left of it beside a stream

Where = Literal["prefill", "decode"]


@dataclass(frozen=True)
class AtPrefill:
    """A prefill worker, for one request: what it would compute, and what before that. `asking_s`: until the decode
    worker has answered with a reservation."""

    missing_tokens: int
    queued_tokens: int
    speed: Speed
    asking_s: float = 0.0


@dataclass(frozen=True)
class AtDecode:
    """A decode worker, for one request. `streams_since`: when the oldest stream there began; None: there is none.
    `longest_stream`: tokens of the longest prompt that one of them had. `at_rest`: it has nothing whatsoever to do."""

    worker: str
    missing_tokens: int
    queued_tokens: int
    speed: Speed
    streams_since: float | None = None
    longest_stream: int = 0
    at_rest: bool = False


@dataclass(frozen=True)
class Choice:
    """`ttft_s`: the time to the first token as predicted; None while the worker's speed is not known.
    `worker`: which decode worker computes, when it is one."""

    where: Where
    reason: str
    ttft_s: float | None = None
    worker: str = ""


def choose(prefill: AtPrefill, helpers: Sequence[AtDecode] | None, arrived_at: float) -> Choice:
    """`helpers`: decode workers with room for one more prompt; None where decode shall not compute any.
    `arrived_at`: of the request, on the clock that `streams_since` is on."""
    if helpers is None:
        return Choice("prefill", "never_local", _if_known(prefill.speed, prefill_s(prefill, NOMINAL_TOKENS_PER_S)))
    if (alone := _lone(prefill, helpers)) is not None:
        return alone
    usual = _usual_speed(prefill, helpers)
    remote_s = prefill_s(prefill, usual)
    allowed = [(helper, reason) for helper in helpers if (reason := may_help(helper, arrived_at))]
    if not allowed:
        return Choice("prefill", "itl_budget" if helpers else "decode_full", _if_known(prefill.speed, remote_s))
    best, reason = min(allowed, key=lambda pair: decode_s(pair[0], usual))
    local_s = decode_s(best, usual)
    if local_s < CLEARLY_FASTER * remote_s:
        return Choice("decode", reason, _if_known(best.speed, local_s), best.worker)
    return Choice("prefill", "faster_there", _if_known(prefill.speed, remote_s))


def _lone(prefill: AtPrefill, helpers: Sequence[AtDecode]) -> Choice | None:
    """The choice if the prompt has the machine to itself and decode is as fast; else None."""
    idle = [h for h in helpers if h.at_rest and h.streams_since is None and not h.queued_tokens]
    if prefill.queued_tokens or not idle:
        return None
    there = replace(prefill, speed=_of_lone(prefill.speed))
    resting = [replace(h, speed=_of_lone(h.speed)) for h in idle]
    usual = _usual_speed(there, resting)
    best = min(resting, key=lambda h: decode_s(h, usual))
    if decode_s(best, usual) > AS_FAST * prefill_s(there, usual):
        return None
    return Choice("decode", "idle", _if_known(best.speed, decode_s(best, usual)), best.worker)


def _of_lone(speed: Speed) -> Speed:
    return replace(speed, prompt_tokens_per_s=speed.lone_tokens_per_s)


def forced(reason: str, decode: AtDecode) -> Choice:
    """There is nobody but this decode worker."""
    return Choice("decode", reason, _if_known(decode.speed, decode_s(decode, NOMINAL_TOKENS_PER_S)), decode.worker)


def may_help(helper: AtDecode, arrived_at: float) -> str:
    """Why the decode worker may compute the prompt of a request that came then; empty if it may not."""
    if helper.streams_since is None:
        return "idle"
    if helper.speed.keeps_slo:
        return "within_slo"
    same_burst = helper.streams_since > arrived_at and helper.missing_tokens <= helper.longest_stream
    return "same_burst" if same_burst else ""


def prefill_s(prefill: AtPrefill, usual: float) -> float:
    """To the first token, by way of a prefill worker. It comes from there: the transfer of KV does not delay it."""
    speed = prefill.speed.prompt_tokens_per_s or usual
    return max(prefill.asking_s, prefill.queued_tokens / speed) + prefill.missing_tokens / speed


def decode_s(helper: AtDecode, usual: float) -> float:
    """To the first token, computed by a decode worker. Once it is through with one of those before, that is a stream
    which the rest goes beside."""
    alone = helper.speed.prompt_tokens_per_s or usual
    beside = helper.speed.beside_tokens_per_s or alone * BESIDE_SHARE
    streams = helper.streams_since is not None
    mine = beside if streams or helper.queued_tokens else alone
    return helper.queued_tokens / (beside if streams else alone) + helper.missing_tokens / mine


def _if_known(speed: Speed, ttft_s: float) -> float | None:
    return ttft_s if speed.prompt_tokens_per_s else None


def _usual_speed(prefill: AtPrefill, helpers: Sequence[AtDecode]) -> float:
    """Of a worker that has not computed any prompt yet: that of those which have."""
    known = [s for s in (prefill.speed, *(h.speed for h in helpers)) if s.prompt_tokens_per_s]
    return sum(s.prompt_tokens_per_s for s in known) / len(known) if known else NOMINAL_TOKENS_PER_S
