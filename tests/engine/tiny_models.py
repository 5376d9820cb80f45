"""Tiny random-weight models of every family that must be served, and the greedy text they should give."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model import LoadedModel, describe
from pdserve.engine.runner import Chunk, Runner

VOCAB = 131
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
WINDOW = 9
MIXED = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**COMMON, head_dim=12),
    "qwen2": lambda: hf.Qwen2Config(**COMMON),
    "qwen2-window": lambda: hf.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED
    ),
    "qwen3": lambda: hf.Qwen3Config(**COMMON, head_dim=8),
    "mistral-window": lambda: hf.MistralConfig(**COMMON, sliding_window=WINDOW),
    "gemma2": lambda: hf.Gemma2Config(
        **COMMON,
        head_dim=8,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**COMMON, head_dim=8, sliding_window=WINDOW, layer_types=MIXED),
    "phi3": lambda: hf.Phi3Config(**COMMON),
    "olmo2": lambda: hf.Olmo2Config(**COMMON),
    "granite": lambda: hf.GraniteConfig(
        **COMMON, attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=2.0, embedding_multiplier=3.0
    ),
    "mixtral": lambda: hf.MixtralConfig(**COMMON, num_local_experts=4, sliding_window=WINDOW),
    "qwen2-moe-mask-only-window": lambda: hf.Qwen2MoeConfig(
        **COMMON, **MOE, shared_expert_intermediate_size=24, use_sliding_window=True, sliding_window=WINDOW,
        layer_types=MIXED,
    ),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**COMMON, **MOE, head_dim=8),
    "gpt-oss": lambda: hf.GptOssConfig(
        **COMMON, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, layer_types=MIXED
    ),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**{**COMMON, "num_key_value_heads": 4}),
    "cohere2": lambda: hf.Cohere2Config(**COMMON, sliding_window=WINDOW, layer_types=MIXED),
    "starcoder2": lambda: hf.Starcoder2Config(**COMMON, sliding_window=WINDOW),
    "stablelm": lambda: hf.StableLmConfig(**COMMON),
    "deepseek-v3": lambda: hf.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=10, qk_rope_head_dim=6,
        v_head_dim=12,
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **COMMON, head_dim=8, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=48,
        attention_chunk_size=128, interleave_moe_layer_step=2,
    ),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    """The family's model with reproducible weights; biases and sinks, which start at zero, are made to matter."""
    torch.manual_seed(7)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.5)
    return model.eval()


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by `generate`, one sequence alone, EOS ignored."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    return output[0, len(prompt) :].tolist()


def load(model: PreTrainedModel) -> LoadedModel:
    return describe(model, fingerprint="tiny", max_model_len=model.config.max_position_embeddings)


def poisoned_cache(loaded: LoadedModel, num_blocks: int, block_size: int) -> KVCache:
    """A cache whose every unwritten value is NaN, so that reading one shows."""
    cache = KVCache(loaded.layout, num_blocks, block_size)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    return cache


@dataclass
class TinySequence:
    """One sequence of the miniature scheduler below."""

    prompt: list[int]
    blocks: list[int]
    chunk_tokens: int
    computed: int = 0

    def __post_init__(self) -> None:
        self.output: list[int] = []

    def next_chunk(self) -> Chunk:
        tokens = (self.prompt + self.output)[self.computed :]
        if len(tokens) > 1:
            tokens = tokens[: self.chunk_tokens]
        done = self.computed + len(tokens) == len(self.prompt) + len(self.output)
        return Chunk(token_ids=tokens, start=self.computed, blocks=self.blocks, sample=done)


def step(runner: Runner, sequences: Sequence[TinySequence]) -> None:
    """Run the next chunk of every sequence in one batch and append greedy tokens."""
    chunks = [sequence.next_chunk() for sequence in sequences]
    logits = iter(runner.forward(chunks))
    for sequence, chunk in zip(sequences, chunks, strict=True):
        sequence.computed += len(chunk.token_ids)
        if chunk.sample:
            sequence.output.append(int(next(logits).argmax()))


def fragmented_tables(num_blocks: int, lengths: Sequence[int], block_size: int, seed: int = 5) -> list[list[int]]:
    """Disjoint block tables in random order for sequences of these lengths."""
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]
