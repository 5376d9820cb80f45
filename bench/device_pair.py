"""One prefill and one decode worker on one GPU, each a process of its own: exact text, exposed transfer, clean end.

The text of a float32 model with random weights is held against `generate`. Where the two best logits are closer than
1e-4, either token is right, and the rest of that text is not compared.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as hf_logging

from .device_driver import Driver
from .device_report import Check, Setting

TIE = 1e-4
MOST_EXPOSED = 0.05  # of the time to the first token
LEFT_BYTES = 64 << 20  # that a driver may keep of ended processes for a moment


@dataclass(frozen=True)
class Pair:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    dtype: torch.dtype
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    flags: tuple[str, ...] = ()


EXACT = Pair(512, 1024, 6, 8, 4, 4096, torch.float32, (700, 33, 1, 258, 1500), 48)
TIMED = Pair(2048, 8192, 16, 32, 8, 128_256, torch.bfloat16, (4096,), 32)
DRY = Pair(64, 96, 2, 4, 2, 256, torch.float32, (70, 5, 33), 6, ("--chunk-tokens", "32", "--kv-blocks", "64"))
GPU_FLAGS = ("--gpu-memory-utilization", "0.3", "--max-sequences", "8", "--chunk-tokens", "2048")


def run(setting: Setting) -> Iterator[Check]:
    gc.collect()
    before = _free_bytes(setting.device)
    yield from _exact(setting, DRY if setting.dry else EXACT)
    if not setting.dry:
        yield from _timed(setting, TIMED)
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
        left = before - _free_bytes(setting.device)
        yield Check("device memory is as it was", ok=left <= LEFT_BYTES, value=left / 2**20, unit="MiB more")


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def _save(pair: Pair, directory: Path, device: torch.device) -> Any:
    """The model, written where the workers load it from."""
    config = LlamaConfig(
        vocab_size=pair.vocab, hidden_size=pair.hidden, intermediate_size=pair.inner, num_hidden_layers=pair.layers,
        num_attention_heads=pair.heads, num_key_value_heads=pair.kv_heads, bos_token_id=1, eos_token_id=2,
        max_position_embeddings=8192, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(1)
    auto_model: Any = AutoModelForCausalLM  # transformers is untyped here
    with torch.device(device):
        model = auto_model.from_config(config, dtype=pair.dtype, attn_implementation="eager")
    model.train(False)
    if not sys.stderr.isatty():
        logging_of_transformers: Any = hf_logging
        logging_of_transformers.disable_progress_bar()
    model.save_pretrained(directory)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(directory / "tokenizer.json"))
    return model


def _prompts(pair: Pair) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    prompts: list[list[int]] = [
        torch.randint(3, pair.vocab, (length,), generator=generator).tolist() for length in pair.prompt_tokens
    ]
    return prompts


def _driver(pair: Pair, directory: Path, setting: Setting) -> Driver:
    flags = ["--device", str(setting.device), "--dtype", str(pair.dtype).removeprefix("torch."), "--check-invariants"]
    flags += [*pair.flags, *(() if setting.dry else GPU_FLAGS)]
    return Driver(directory, flags, ready_timeout_s=120.0)


def _exact(setting: Setting, pair: Pair) -> Iterator[Check]:
    prompts = _prompts(pair)
    with tempfile.TemporaryDirectory(prefix="pdserve-check-") as name:
        model = _save(pair, Path(name), setting.device)
        expected = [_generate(model, prompt, pair.output_tokens) for prompt in prompts]
        with _driver(pair, Path(name), setting) as driver:
            direct = None if setting.dry else driver.link == "cuda_ipc"
            yield Check(
                "both workers ready and linked", ok=True, target="cuda_ipc", met=direct, note=f"link {driver.link}"
            )
            for label, part in (("one by one", [[prompt] for prompt in prompts]), ("all at once", [prompts])):
                found = [told.tokens for group in part for told in driver.run(group, pair.output_tokens, 60.0)]
                wrong, ties = _compare(model, prompts, expected, found)
                yield Check(
                    f"text equals generate, {label}", ok=not wrong, value=sum(map(len, found)), unit="tokens",
                    note=wrong or f"{ties} ties",
                )  # fmt: skip
            yield Check("idle workers hold no blocks", ok=driver.held_blocks() == 0)


def _generate(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def _compare(
    model: Any, prompts: list[list[int]], expected: list[list[int]], found: list[list[int]]
) -> tuple[str, int]:
    """What is wrong ("" if nothing), and how many texts part at a tie."""
    ties = 0
    for number, (prompt, right, mine) in enumerate(zip(prompts, expected, found, strict=True)):
        if right == mine:
            continue
        at = next((i for i, (a, b) in enumerate(zip(right, mine, strict=False)) if a != b), min(len(right), len(mine)))
        if len(right) != len(mine):
            return f"text {number} has {len(mine)} tokens instead of {len(right)}", ties
        logits: Tensor = model(torch.tensor([prompt + right[:at]], device=model.device)).logits[0, -1]
        if (logits.max() - logits[mine[at]]).item() > TIE:
            return f"text {number} parts at token {at}: {mine[at]} instead of {right[at]}", ties
        ties += 1
    return "", ties


def _timed(setting: Setting, pair: Pair) -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="pdserve-check-") as name:
        started = time.perf_counter()
        _save(pair, Path(name), setting.device)
        gc.collect()
        torch.cuda.empty_cache()
        with _driver(pair, Path(name), setting) as driver:
            taken = time.perf_counter() - started
            yield Check("1B: both workers ready", ok=True, value=taken, unit="s", note=f"link {driver.link}")
            told = [driver.run([prompt], pair.output_tokens, 60.0)[0] for prompt in _prompts(pair) * 6][1:]
        first = statistics.median(t.first_at - t.sent_at for t in told)
        steps = statistics.median(
            later - earlier for t in told for earlier, later in zip(t.token_at[1:-1], t.token_at[2:], strict=True)
        )
        # From the first token to the second: what was left of the transfer, and one step.
        exposed = max(0.0, statistics.median(t.token_at[1] - t.first_at for t in told) - steps)
        tokens = pair.prompt_tokens[0]
        yield Check(f"1B, {tokens} tokens: time to first token", ok=True, value=first * 1e3, unit="ms")
        yield Check("1B: time between tokens", ok=True, value=steps * 1e3, unit="ms")
        yield Check(
            "1B: exposed transfer", ok=True, value=exposed / first * 100, unit="% of TTFT",
            target=f"<= {MOST_EXPOSED:.0%}", met=exposed <= MOST_EXPOSED * first,
        )  # fmt: skip
