"""Random Llama checkpoints of a few hundred kilobytes, for tests in which the text has no meaning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

VOCAB_SIZE = 320
MAX_MODEL_LEN = 32_768  # some tests ask for more tokens than anybody computes while they run
SPECIAL = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _tokenizer() -> Any:
    """One token per byte, so that every length in a test is known."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *alphabet])}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    make: Any = transformers.PreTrainedTokenizerFast
    return make(tokenizer_object=raw, bos_token=SPECIAL[0], eos_token=SPECIAL[1], chat_template=CHAT_TEMPLATE)


def write_tiny_llama(
    directory: Path, seed: int, *, num_layers: int = 4, hidden_size: int = 64, vocab_size: int = VOCAB_SIZE
) -> Path:
    """A Llama in `directory`, the same for the same seed. Returns the directory."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        # Wide enough that attention decides what comes next; with the usual 0.02 every context gives the same text.
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return write_tiny_tokenizer(directory)


def write_tiny_tokenizer(directory: Path) -> Path:
    _tokenizer().save_pretrained(directory)
    return directory


def tiny_tokens(text: str) -> list[int]:
    """One token per byte of the text."""
    ids: list[int] = _tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def load_tiny_llama(directory: Path) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids without special ones."""
    rng = random.Random(seed)
    return [rng.randrange(len(SPECIAL), len(SPECIAL) + 256) for _ in range(num_tokens)]
