"""A whole decode step of random-weight Llama shapes, with CUDA graphs, against the time to read its bytes once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from ..engine.block_pool import BlockPool
from ..engine.graphs import CudaCapture, DecodeGraphs, call_again
from ..engine.kv_cache import KVCache
from ..engine.model import LoadedModel, describe
from ..engine.runner import Chunk, Runner
from .device_clock import copy_bytes_per_s, seconds
from .device_report import Check, Setting

BLOCK_SIZE = 16
CONTEXT_TOKENS = 512
BATCHES = (1, 32)
MOST_TIMES_FLOOR = 1.15
# Of logits, in their standard deviations; bfloat16 rounds differently in products of other shapes.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SHAPES = {
    "1B": Shape(2048, 8192, 16, 32, 8, 64, 128_256),
    "8B": Shape(4096, 14_336, 32, 32, 8, 128, 128_256),
}
DRY_SHAPES = {"tiny": Shape(64, 96, 2, 4, 2, 16, 256)}


def random_llama(shape: Shape, device: torch.device, dtype: torch.dtype, max_model_len: int) -> LoadedModel:
    """A model that says nothing, of the right size; its weights are made on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_model_len,
    )
    torch.manual_seed(0)
    with torch.device(device):
        auto_model: Any = AutoModelForCausalLM  # transformers is untyped here
        module = auto_model.from_config(config, dtype=dtype, attn_implementation="eager")
    module.train(False)
    module.requires_grad_(False)
    return describe(module, fingerprint="random", max_model_len=max_model_len)


def bytes_of_step(model: LoadedModel, batch: int, context_tokens: int) -> int:
    """All weights but the embeddings, of which a few rows are read, and the KV of every sequence."""
    embeddings = model.module.get_input_embeddings().weight
    weights = sum(p.numel() * p.element_size() for p in model.module.parameters() if p is not embeddings)
    return weights + batch * context_tokens * model.layout.bytes_per_token


def _decode(step: Callable[[list[Chunk]], Tensor], chunks: list[Chunk]) -> list[int]:
    """What a worker does for greedy sequences: the step, and its tokens on the host."""
    tokens: list[int] = step(chunks).argmax(dim=-1).tolist()
    return tokens


def run(setting: Setting) -> Iterator[Check]:
    context = 24 if setting.dry else CONTEXT_TOKENS
    dtype = torch.float32 if setting.dry else torch.bfloat16
    ceiling = copy_bytes_per_s(setting.device)
    yield Check("copy ceiling", ok=True, value=ceiling / 1e9, unit="GB/s")
    for name, shape in (DRY_SHAPES if setting.dry else SHAPES).items():
        started = time.perf_counter()
        model = random_llama(shape, setting.device, dtype, 2 * context)
        yield Check(f"{name}: loaded and probed", ok=True, value=time.perf_counter() - started, unit="s")
        yield from _steps(name, model, setting, context, ceiling)
        del model


def _steps(name: str, model: LoadedModel, setting: Setting, context: int, ceiling: float) -> Iterator[Check]:
    blocks_each = -(-2 * context // BLOCK_SIZE)
    pool = BlockPool(blocks_each * max(BATCHES), BLOCK_SIZE)
    cache = KVCache(model.layout, pool.num_blocks, BLOCK_SIZE, setting.device)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    runner = Runner(model, cache)
    started = time.perf_counter()
    capture = CudaCapture(setting.device) if setting.device.type == "cuda" else call_again
    graphs = DecodeGraphs(runner, BATCHES, 2 * context, capture)
    yield Check(f"{name}: capture of {len(BATCHES)} sizes", ok=True, value=time.perf_counter() - started, unit="s")
    tables = [list(pool.allocate(blocks_each)) for _ in range(max(BATCHES))]
    for batch in BATCHES:
        chunks = [Chunk([row + 1], context, tables[row], True) for row in range(batch)]
        expected = runner.forward(chunks)
        difference = ((graphs.run(chunks) - expected).abs().max() / expected.std()).item()
        yield Check(
            f"{name}, batch {batch}: replay equals eager", ok=difference <= TOLERANCE, value=difference, unit="std"
        )
        floor = bytes_of_step(model, batch, context) / ceiling
        eager = seconds(partial(_decode, runner.forward, chunks), setting.device)
        taken = seconds(partial(_decode, graphs.run, chunks), setting.device)
        yield Check(
            f"{name}, batch {batch}: decode step", ok=True, value=taken * 1e3, unit="ms",
            target=f"<= {MOST_TIMES_FLOOR} x floor {floor * 1e3:.3f} ms",
            met=None if setting.dry else taken <= MOST_TIMES_FLOOR * floor,
            note=f"{taken / floor:.2f} x floor; eager {eager * 1e3:.2f} ms",
        )  # fmt: skip
