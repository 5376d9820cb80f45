"""`pdserve bench perplexity`: the figures of a tiny model against its own loss, and one JSON line at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pdserve.bench.__main__ import main
from pdserve.bench.perplexity import documentation, score, windows_of
from pdserve.engine.model import load_model
from tests.system.tiny_model import load_tiny_llama, tiny_tokens, write_tiny_llama

FEW = ("--windows", "2", "--window-tokens", "40", "--chunk-tokens", "16")


def test_every_kind_is_scored_and_the_last_line_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_tiny_llama(tmp_path, 1)
    assert main(["perplexity", "--model", str(directory), *FEW]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]
    assert [row["weights"] for row in scores] == ["none", "int8", "int4"]
    assert scores[0]["more_percent"] == 0
    assert len({row["perplexity"] for row in scores}) == 3
    assert all(row["perplexity"] > 1 and row["tokens_per_s"] > 0 for row in scores)


def test_score_is_the_cross_entropy_of_every_token_but_the_first(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path, 1)
    window = tiny_tokens("Of all that is written, the last token is never a context.")
    loaded = load_model(
        directory, fingerprint="f", dtype="float32", device="cpu", max_model_len=None, trust_remote_code=False
    )
    ids = torch.tensor([window])
    with torch.inference_mode():
        expected = load_tiny_llama(directory)(ids, labels=ids).loss.item()
    for chunk_tokens in (7, len(window) - 1, 100):
        assert score(loaded, [window], chunk_tokens) == pytest.approx(expected, rel=1e-4)


def test_the_text_is_long_enough_and_the_same_every_time() -> None:
    text = "\n".join(documentation())
    assert len(text) > 200_000
    assert text == "\n".join(documentation())


def test_windows_follow_each_other() -> None:
    class Bytes:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return list(text.encode())

    first, second = windows_of(Bytes(), 50, 2)
    assert first + second == windows_of(Bytes(), 100, 1)[0]


@pytest.mark.parametrize(
    "flags", [["--quantization", "int3"], ["--windows", "0"], ["--window-tokens", "1"], ["--windows", "100000000"]]
)
def test_what_cannot_be_measured_is_refused(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["perplexity", "--model", str(write_tiny_llama(tmp_path, 1)), *flags]) == 2
    assert flags[0] in capsys.readouterr().err
