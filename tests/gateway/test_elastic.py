"""Who computes a prompt: situations, and the choice with its reason."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.elastic import AtDecode, AtPrefill, Choice, choose, decode_s, forced
from pdserve.transfer.reports import Speed

FAST = Speed(prompt_tokens_per_s=500.0)
DECODE = Speed(prompt_tokens_per_s=500.0, step_s=0.03, beside_tokens_per_s=250.0)
ARRIVED = 100.0
EARLIER, LATER = 90.0, 101.0  # when streams began


def there(queued: int = 0, speed: Speed = FAST, asking: float = 0.0) -> AtPrefill:
    return AtPrefill(400, queued, speed, asking)


def here(
    since: float | None = None, queued: int = 0, keeps_slo: bool = False, missing: int = 400, speed: Speed = DECODE,
    name: str = "d", longest: int = 400, at_rest: bool = False,
) -> AtDecode:  # fmt: skip
    return AtDecode(name, missing, queued, dataclasses.replace(speed, keeps_slo=keeps_slo), since, longest, at_rest)


def lone(tokens_per_s: float) -> Speed:
    return dataclasses.replace(DECODE, lone_tokens_per_s=tokens_per_s)


SITUATIONS = {
    "all idle, but somebody is on the way to decode": (there(), [here()], "prefill", "faster_there"),
    "all idle": (there(), [here(at_rest=True)], "decode", "idle"),
    "all idle, decode is slower": (there(speed=lone(900)), [here(at_rest=True, speed=lone(700))], "prefill",
        "faster_there"),
    "all idle, decode was measured without help": (there(speed=lone(900)), [here(at_rest=True)], "decode", "idle"),
    "all idle, decode is slower, which asking it makes up for": (
        there(speed=lone(900), asking=0.1), [here(at_rest=True, speed=lone(700))], "decode", "idle"),
    "decode idle, a prompt at prefill that is as short": (
        there(80), [here(at_rest=True)], "prefill", "faster_there"),
    "all idle but for a stream of another gateway": (there(), [here(EARLIER, at_rest=True)], "prefill", "itl_budget"),
    "prefill has one more: the idle decode worker helps": (there(400), [here()], "decode", "idle"),
    "hardly queued: not worth it": (there(80), [here()], "prefill", "faster_there"),
    "decode has most of it cached": (there(), [here(missing=40)], "decode", "idle"),
    "the same beside a stream, which comes first": (there(), [here(EARLIER, missing=40)], "prefill", "itl_budget"),
    "overload beside an older stream": (there(100_000), [here(EARLIER)], "prefill", "itl_budget"),
    "the same, with leave to do so": (there(100_000), [here(EARLIER, keeps_slo=True)], "decode", "within_slo"),
    "leave, but prefill is faster": (there(), [here(EARLIER, keeps_slo=True)], "prefill", "faster_there"),
    "beside streams that came with it": (there(800), [here(LATER)], "decode", "same_burst"),
    "beside those, whose prompts were shorter": (there(800), [here(LATER, longest=64)], "prefill", "itl_budget"),
    "beside those, but prefill is as fast": (there(400), [here(LATER)], "prefill", "faster_there"),
    "decode computes another one first": (there(400), [here(queued=400)], "prefill", "faster_there"),
    "that, and prefill even more": (there(1600), [here(queued=400)], "decode", "idle"),
    "no decode worker has room": (there(100_000), [], "prefill", "decode_full"),
    "decode shall never compute": (there(100_000), None, "prefill", "never_local"),
    "prefill is slow": (there(speed=Speed(100.0)), [here()], "decode", "idle"),
    "nothing is known: equal speeds": (there(speed=Speed()), [here(speed=Speed())], "prefill", "faster_there"),
    "nothing is known, prefill is busy": (there(400, Speed()), [here(speed=Speed())], "decode", "idle"),
    "of two, the one that may": (there(4000), [here(EARLIER, name="a"), here(name="d")], "decode", "idle"),
    "of two, the faster one": (there(4000), [here(LATER, name="a"), here(name="d")], "decode", "idle"),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_choice_and_reason(situation: str) -> None:
    prefill, helpers, where, reason = SITUATIONS[situation]
    choice = choose(prefill, helpers, ARRIVED)
    assert (choice.where, choice.reason) == (where, reason)
    assert choice.worker == ("d" if where == "decode" else "")


def test_time_is_predicted_for_what_is_chosen_and_only_if_its_speed_is_known() -> None:
    assert choose(there(100), [here()], ARRIVED).ttft_s == pytest.approx(500 / 500)
    assert choose(there(1600), [here(queued=200)], ARRIVED).ttft_s == pytest.approx(200 / 500 + 400 / 250)
    assert choose(there(100), None, ARRIVED).ttft_s == pytest.approx(500 / 500)
    assert choose(there(speed=Speed()), [here(EARLIER)], ARRIVED).ttft_s is None
    assert forced("no_prefill", here(EARLIER)) == Choice("decode", "no_prefill", 400 / 250, "d")
    assert forced("no_prefill", here(speed=Speed())).ttft_s is None


@given(
    queued=st.integers(0, 10_000), keeps_slo=st.booleans(), since=st.none() | st.floats(0, 200),
    speeds=st.tuples(*[st.sampled_from([0.0, 10.0, 500.0, 1e5])] * 3),
)  # fmt: skip
def test_an_older_stream_is_disturbed_only_with_leave(
    queued: int, keeps_slo: bool, since: float | None, speeds: tuple[float, float, float]
) -> None:
    helper = here(since, keeps_slo=keeps_slo, speed=Speed(speeds[1], 0.03, speeds[2]))
    choice = choose(there(queued, Speed(speeds[0])), [helper], ARRIVED)
    if choice.where == "decode":
        assert since is None or since > ARRIVED or keeps_slo
        assert choice.reason == ("idle" if since is None else "within_slo" if keeps_slo else "same_burst")
        assert choice.ttft_s is None or choice.ttft_s == pytest.approx(decode_s(helper, speeds[1]))
