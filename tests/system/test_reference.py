"""The judge of the exactness suites is itself right: its cache, its tie rule, its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.exact.prompts import long_prompts
from tests.exact.reference import TIE_MARGIN, Case, Parting, Reference, agree, generate, parting, template_ids
from tests.system.tiny_model import load_tiny_llama, random_prompt

pytestmark = pytest.mark.timeout(120, method="signal")

PROMPT = [5, 6, 7]
CASE = Case("case", [], PROMPT, [10, 11, 12, 13])


class Margins(Reference):
    """A reference whose top-2 margin is small behind the given prefixes only."""

    def __init__(self, directory: Path, *ties: list[int]) -> None:
        super().__init__(lambda: pytest.fail("no model is needed"), "margins", directory)
        self._ties = ties

    def parting(self, prefix: Sequence[int]) -> Parting:
        return Parting(0, TIE_MARGIN / 2 if list(prefix) in self._ties else TIE_MARGIN * 2)


def never(prompt: list[int], max_tokens: int) -> list[int]:
    pytest.fail("nothing is to be continued")


def test_equal_tokens_agree_without_asking_the_model(tmp_path: Path) -> None:
    assert agree(CASE, [10, 11, 12, 13], Margins(tmp_path), never) == 0


@pytest.mark.parametrize("got", [[10, 99, 12, 13], [10, 11], [10, 11, 12, 13, 14], []])
def test_other_tokens_or_lengths_are_an_error_that_shows_both(tmp_path: Path, got: list[int]) -> None:
    with pytest.raises(AssertionError, match=r"case: 3 prompt tokens, parted at output token"):
        agree(CASE, got, Margins(tmp_path, [*PROMPT, 10, 11]), never)


def test_tie_is_counted_and_the_rest_compared_behind_the_reference_token(tmp_path: Path) -> None:
    asked = []

    def go_on(prompt: list[int], max_tokens: int) -> list[int]:
        asked.append((prompt, max_tokens))
        return [12, 13]

    assert agree(CASE, [10, 99, 98, 97], Margins(tmp_path, [*PROMPT, 10]), go_on) == 1
    assert asked == [([*PROMPT, 10, 11], 2)]


def test_wrong_token_behind_a_tie_is_still_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="parted at output token 3"):
        agree(CASE, [10, 99, 98, 97], Margins(tmp_path, [*PROMPT, 10]), lambda *_: [12, 96])


def test_reference_is_what_transformers_generates_and_comes_from_disk_the_second_time(
    tiny: Path, tmp_path: Path
) -> None:
    prompts = [random_prompt(seed, 20) for seed in range(2)]
    model = load_tiny_llama(tiny)
    fresh = Reference(lambda: model, "weights", tmp_path)
    outputs = [fresh.output(prompt, 12, ignore_eos=True) for prompt in prompts]
    assert outputs == [generate(model, prompt, 12, ignore_eos=True) for prompt in prompts]
    stored = Reference(lambda: pytest.fail("it is on disk"), "weights", tmp_path)
    assert [stored.output(prompt, 12, ignore_eos=True) for prompt in prompts] == outputs
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == 12
        assert parting(model, [*prompt, *output[:5]]).best == output[5]


def test_long_prompts_have_the_lengths_that_the_suite_promises() -> None:
    lengths = [len(template_ids(prompt.messages)) for prompt in long_prompts()]
    assert len(lengths) == 10
    assert min(lengths) >= 1000
    assert 2500 < max(lengths) <= 3000
