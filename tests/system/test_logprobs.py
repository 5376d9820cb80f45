"""Log probabilities of a running system, against transformers' log-softmax and against themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.exact.reference import Reference, demo_tokenizer
from tests.system.harness import System, eventually

pytestmark = pytest.mark.timeout(300, method="signal")

TOLERANCE = 1e-4
EMOJI = [{"role": "user", "content": "Write five emojis of animals, nothing else."}]
PROMPT = "The capital of France is Paris. The capital of Italy is"


def ask(system: System, path: str, **body: Any) -> dict[str, Any]:
    response = system.client.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_lm_eval_gets_the_references_probabilities_of_prompts_given_as_tokens(
    demo_system: System, reference: Reference
) -> None:
    assert_right_for_lm_eval(demo_system, reference)


def test_lm_eval_gets_the_same_without_prefill_workers(reference: Reference) -> None:
    flags = ("--aggregated", "--kv-blocks", 64, "--chunk-tokens", 8, "--check-invariants")
    with System("demo", *flags, prefill=0) as system:
        assert_right_for_lm_eval(system, reference)


def assert_right_for_lm_eval(system: System, reference: Reference) -> None:
    prompts: list[list[int]] = [demo_tokenizer()(text).input_ids for text in (PROMPT, "Once upon a time, in a land")]
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "return_token_ids": True}
    answer = ask(system, "/v1/completions", prompt=prompts, **fields)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs, tokens = choice["logprobs"], prompt + choice["token_ids"]
        scores = reference.scores(tokens, 1)
        assert {len(column) for column in logprobs.values()} == {len(prompt) + 1}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        expected = [score.logprob for score in scores]
        assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=TOLERANCE)
        best = [max(tops.values()) for tops in logprobs["top_logprobs"][1:]]
        assert best == pytest.approx([score.top_logprobs[0] for score in scores], abs=TOLERANCE)
        assert "".join(logprobs["tokens"]) == choice["text"] == demo_tokenizer().decode(tokens)
        places = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
        assert all(choice["text"].startswith(token, offset) for offset, token in places)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_a_prompt_is_scored_alone_and_warm_caches_do_not_change_that(
    demo_system: System, reference: Reference
) -> None:
    prompt = demo_tokenizer()(PROMPT * 6).input_ids
    ask(demo_system, "/v1/completions", prompt=prompt, max_tokens=1)  # fills the caches
    fields = {"max_tokens": 0, "echo": True, "logprobs": 0, "prompt_logprobs": 2}
    answer = ask(demo_system, "/v1/completions", prompt=prompt, **fields)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    scores = reference.scores(prompt, 2)
    expected = [score.logprob for score in scores]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=TOLERANCE)
    assert choice["prompt_logprobs"][0] is None
    for token, score, said in zip(prompt[1:], scores, choice["prompt_logprobs"][1:], strict=True):
        own = said[str(token)]
        assert own["logprob"] == pytest.approx(score.logprob, abs=TOLERANCE)
        assert own["rank"] == score.rank
        assert set(said) == {str(token), *map(str, score.top_ids)}
        assert own["decoded_token"] == demo_tokenizer().decode([token])


def test_a_chats_entries_are_the_references_and_their_bytes_are_the_text(
    demo_system: System, reference: Reference
) -> None:
    fields = {"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    answer = ask(demo_system, "/v1/chat/completions", messages=EMOJI, **fields)
    (choice,) = answer["choices"]
    content, tokens = choice["logprobs"]["content"], choice["token_ids"]
    scores = reference.scores(answer["prompt_token_ids"] + tokens, 3)[len(answer["prompt_token_ids"]) - 1 :]
    assert len(content) == len(tokens)
    for entry, score in zip(content, scores, strict=True):
        assert entry["logprob"] == pytest.approx(score.logprob, abs=TOLERANCE)
        tops = [other["logprob"] for other in entry["top_logprobs"]]
        assert tops == pytest.approx(score.top_logprobs, abs=TOLERANCE)
    raw = b"".join(bytes(entry["bytes"] or []) for entry in content)
    assert raw.decode(errors="replace") == choice["message"]["content"]
    assert choice["logprobs"]["refusal"] is None


@pytest.mark.parametrize("stop", [None, "."])
def test_streamed_entries_add_up_to_the_plain_ones(demo_system: System, stop: str | None) -> None:
    fields = {"temperature": 0.9, "seed": 11, "max_tokens": 16, "stop": stop}
    chat = {"messages": EMOJI, "logprobs": True, "top_logprobs": 2, **fields}
    (plain,) = ask(demo_system, "/v1/chat/completions", **chat)["choices"]
    with demo_system.client.events("/v1/chat/completions", **chat) as events:
        chunks = [event["choices"][0] for event in events]
    streamed = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert streamed == plain["logprobs"]["content"]
    text = {"prompt": PROMPT, "echo": True, "logprobs": 2, **fields}
    (whole,) = ask(demo_system, "/v1/completions", **text)["choices"]
    with demo_system.client.events("/v1/completions", **text) as events:
        parts = [event["choices"][0]["logprobs"] for event in events]
    for column, values in whole["logprobs"].items():
        assert [value for part in parts if part for value in part[column]] == values
    assert "".join(whole["logprobs"]["tokens"]).startswith(whole["text"])


def test_the_likeliest_of_several_choices_come_back_best_first(demo_system: System) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.3, "seed": 3, "logprobs": 0, "return_token_ids": True}
    everything = ask(demo_system, "/v1/completions", n=5, **fields)
    demo_system.assert_idle()  # all that was moved for it is counted

    def moved() -> float:
        return demo_system.metric("pdserve_transfer_bytes_total")

    before = moved()
    answer = ask(demo_system, "/v1/completions", n=2, best_of=5, **fields)

    def mean(choice: dict[str, Any]) -> float:
        said = choice["logprobs"]["token_logprobs"]
        return math.fsum(said) / len(said)

    best = sorted(everything["choices"], key=mean, reverse=True)[:2]
    assert [choice["token_ids"] for choice in answer["choices"]] == [choice["token_ids"] for choice in best]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == everything["usage"]["completion_tokens"]
    eventually(lambda: moved() > before, 5, "KV has moved")
    demo_system.assert_idle()
    assert moved() - before < 46_080 * 2 * len(demo_tokenizer()(PROMPT).input_ids), "one prefill, one transfer"
