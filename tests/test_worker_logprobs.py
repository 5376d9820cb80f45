"""Log probabilities through real workers, driven from the gateway's end: whoever computes a token, it is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdserve.transfer.messages import Failed, FirstTokens, PromptLogprobs, Reserved, TokenLogprobs, Tokens
from pdserve.transfer.sampling_params import SamplingParams
from tests.engine.tiny_models import build, prompts
from tests.worker_rig import Rig, prefill_message, reserve_message

TOLERANCE = 1e-4
NUM_TOKENS = 10
TOP = 3
PROMPTS = prompts([50, 3, 33])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def expected(tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]: the reference's log-softmax behind every token."""
    with torch.inference_mode():
        return build("llama")(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)


def params(logprobs: int | None = TOP, prompt_logprobs: int | None = None, **fields: object) -> SamplingParams:
    given = {"max_tokens": NUM_TOKENS, "seed": 5, "temperature": 0.0, "ignore_eos": True, **fields}
    return SamplingParams(**given, logprobs=logprobs, prompt_logprobs=prompt_logprobs)  # type: ignore[arg-type]


def dispatch(rig: Rig, name: str, prompt: list[int], decode: str, prefill: str = "", **change: object) -> None:
    """Through the pair, or, without prefill, to the decode worker alone."""
    message = reserve_message(name, prompt, prefill, **change)
    rig.first_index[name, message.attempt] = len(message.outputs[0])
    rig.live.add((name, message.attempt))
    rig.send(decode, message)
    if prefill:
        reserved = rig.wait_for(Reserved, name, message.attempt)
        assert isinstance(reserved, Reserved)
        rig.send(prefill, prefill_message(message, reserved, decode))


def entries(rig: Rig, name: str, choice: int = 0) -> list[TokenLogprobs]:
    """What decode has said of each token of a choice."""
    return [
        message.logprobs[at]
        for _, message in rig.received
        if isinstance(message, Tokens)
        for at, item in enumerate(message.items)
        if item[0] == name and item[2] == choice
    ]


def prompt_entries(rig: Rig, name: str) -> list[TokenLogprobs]:
    """Contiguous from token 1 on; a later message may say again what an earlier one has said."""
    found: list[TokenLogprobs] = []
    for _, message in rig.received:
        if isinstance(message, PromptLogprobs) and message.request == name:
            assert message.first <= len(found) + 1
            found += message.entries[len(found) + 1 - message.first :]
    return found


def assert_right(said: list[TokenLogprobs], reference: torch.Tensor, tokens: list[int], top: int) -> None:
    assert len(said) == len(tokens)
    for entry, row, token in zip(said, reference, tokens, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
        assert entry.rank == 1 + int((row > row[token]).sum())
        values, ids = row.topk(top)
        assert [other for other, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=TOLERANCE)


def assert_output_right(rig: Rig, name: str, prompt: list[int], top: int = TOP) -> None:
    for choice, tokens in rig.tokens(name).items():
        reference = expected(prompt + tokens)[len(prompt) - 1 :]
        assert_right(entries(rig, name, choice), reference[: len(tokens)], tokens, top)


@pytest.mark.parametrize("aggregated", [False, True], ids=["pair", "aggregated"])
def test_tokens_and_prompts_are_scored_as_the_reference_scores_them(rig: Rig, aggregated: bool) -> None:
    prefill, decode = ("", rig.start_decode()) if aggregated else rig.pair()
    for i, prompt in enumerate(PROMPTS):
        scored = params(prompt_logprobs=2, temperature=1.5, logit_bias={9: 30.0})
        dispatch(rig, f"r{i}", prompt, decode, prefill, params=scored)
    rig.until(lambda: all(rig.finished(f"r{i}") for i in range(3)), "all have finished")
    for i, prompt in enumerate(PROMPTS):
        assert_output_right(rig, f"r{i}", prompt)
        assert_right(prompt_entries(rig, f"r{i}"), expected(prompt)[:-1], prompt[1:], 2)
        if not aggregated:
            first = rig.wait_for(FirstTokens, f"r{i}")
            assert isinstance(first, FirstTokens)
            assert first.logprobs == entries(rig, f"r{i}")[:1], "decode repeats what prefill said"


def test_scores_come_before_the_first_token_though_both_caches_hold_the_prompt(rig: Rig) -> None:
    prefill, decode = rig.pair()
    dispatch(rig, "warm", PROMPTS[0], decode, prefill)
    rig.until(lambda: bool(rig.finished("warm")), "the caches are warm")
    dispatch(rig, "a", PROMPTS[0], decode, prefill, params=params(None, 0))
    rig.until(lambda: bool(rig.finished("a")), "a has finished")
    kinds = [type(m) for _, m in rig.received if isinstance(m, PromptLogprobs | FirstTokens) and m.request == "a"]
    assert kinds[-1] is FirstTokens
    assert kinds.count(PromptLogprobs) > 1, "chunk by chunk"
    assert_right(prompt_entries(rig, "a"), expected(PROMPTS[0])[:-1], PROMPTS[0][1:], 0)
    assert not any(m.logprobs for _, m in rig.received if isinstance(m, Tokens | FirstTokens))


def test_every_choice_has_its_own_entries_from_its_first_token_on(rig: Rig) -> None:
    prefill, decode = rig.pair()
    dispatch(rig, "a", PROMPTS[2], decode, prefill, n=3, params=params(temperature=1.0))
    rig.until(lambda: rig.finished("a") == {0, 1, 2}, "all choices have finished")
    assert len({tuple(tokens) for tokens in rig.tokens("a").values()}) > 1
    assert_output_right(rig, "a", PROMPTS[2])


def test_a_row_that_asks_does_not_make_its_neighbours_pay_or_differ(rig: Rig) -> None:
    decode = rig.start_decode()
    dispatch(rig, "asks", PROMPTS[0], decode, params=params(1))
    dispatch(rig, "plain", PROMPTS[2], decode)
    rig.until(lambda: all(rig.finished(name) for name in ("asks", "plain")), "both have finished")
    assert_output_right(rig, "asks", PROMPTS[0], top=1)
    said = [m.logprobs for _, m in rig.received if isinstance(m, Tokens)]
    assert sum(map(len, said)) == NUM_TOKENS


@pytest.mark.parametrize(("preemption", "swap_bytes"), [("recompute", 0), ("swap", 1 << 20)])
def test_preemption_keeps_every_entry(rig: Rig, preemption: str, swap_bytes: int) -> None:
    decode = rig.start_decode(num_blocks=25, preemption=preemption, swap_bytes=swap_bytes)
    with rig.held_up(decode):
        for i, prompt in enumerate(PROMPTS):
            dispatch(rig, f"r{i}", prompt, decode, params=params(prompt_logprobs=0))
        rig.until(lambda: len(rig.heartbeats[decode].live) == 3, "all are there before the first has gone")
    rig.until(lambda: all(rig.finished(f"r{i}") for i in range(3)), "all have finished")
    assert rig.metric(decode, "pdserve_preemptions_total") > 0
    for i, prompt in enumerate(PROMPTS):
        assert_output_right(rig, f"r{i}", prompt)
        assert_right(prompt_entries(rig, f"r{i}"), expected(prompt)[:-1], prompt[1:], 0)


def test_a_prompt_can_be_scored_without_room_for_a_single_token(rig: Rig) -> None:
    decode = rig.start_decode(num_blocks=10, block_size=5)  # as many tokens as the prompt has
    dispatch(rig, "a", PROMPTS[0], decode, params=params(None, 0, max_tokens=0))
    rig.until(lambda: bool(rig.finished("a")), "a has finished")
    assert_right(prompt_entries(rig, "a"), expected(PROMPTS[0])[:-1], PROMPTS[0][1:], 0)
    assert not [m for _, m in rig.received if isinstance(m, Failed)]
    assert rig.held(decode) == 0
