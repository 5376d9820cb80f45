"""Small tokenizers of every kind, made on the spot and saved as a model directory has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from pdserve.gateway.api.text import Tokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' and not message['tool_call_id'] %}{{ raise_exception('no id') }}{% endif %}"
    "{% if message['content'] == 'forbidden' %}{{ raise_exception('this word is forbidden') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if shout %}{{ 'LOUD' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog. Then the end, and the END of it all!",
    "Ein Käfer über Ärger; façade, naïve, e\u0301",
    "你好世界 こんにちは 한국어 مرحبا 👩‍👩‍👧 🇩🇪 👍🏽",
    "def f(x):\n    return x + 1\n\n\tend\r\n",
]
SPECIALS = ["<unk>", "<s>", "</s>"]


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    # Not special, with characters that ByteLevel's table lacks, and one that it maps to another byte.
    backend.add_tokens(["foo bar", "<\uff5cx\uff5c>", "né"])
    return backend


def _sentencepiece_vocab() -> dict[str, int]:
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "th", "the", "▁th", "▁the", "▁a"]
    pieces += sorted({char for line in CORPUS[:2] for char in line if char != " "})
    return {piece: index for index, piece in enumerate(pieces)}


def _llama_like() -> Backend:
    merges = [("t", "h"), ("th", "e"), ("▁", "th"), ("▁th", "e"), ("▁", "a"), ("▁", "▁")]
    backend = Backend(models.BPE(_sentencepiece_vocab(), merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _gemma_like() -> Backend:
    backend = _llama_like()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _strips_two() -> Backend:
    """Text may stay empty for more than one token."""
    backend = _llama_like()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    return backend


def _unigram() -> Backend:
    pieces = [(piece, -float(index % 7)) for piece, index in _sentencepiece_vocab().items()]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return backend


def _word_piece() -> Backend:
    pieces = [*SPECIALS, "the", "end", ".", "n", "'", "##t", "##ing", "do", "##n", "a", "'s", "!"]
    backend = Backend(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _suffix_bpe() -> Backend:
    """CLIP-like: the end of a word is part of its last token, which only an unknown-decoder path can follow."""
    pieces = [*SPECIALS, "a", "b", "a</w>", "b</w>", "ab", "ab</w>"]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder("</w>")
    return backend


def _no_decoder() -> Backend:
    pieces = [*SPECIALS, "the", "end", "of"]
    return Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte_level": _byte_level,
    "llama_like": _llama_like,
    "gemma_like": _gemma_like,
    "strips_two": _strips_two,
    "unigram": _unigram,
    "word_piece": _word_piece,
    "suffix_bpe": _suffix_bpe,
    "no_decoder": _no_decoder,
}


def save_tokenizer(directory: Path, kind: str, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A directory as `AutoTokenizer` reads it. Text gets a BOS, as with Llama."""
    from transformers import PreTrainedTokenizerFast

    backend = BACKENDS[kind]()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    names: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **names)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: save_tokenizer(root / kind, kind) for kind in BACKENDS}


@pytest.fixture(scope="session")
def tokenizers(tokenizer_dirs: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer(path) for kind, path in tokenizer_dirs.items()}


@pytest.fixture(scope="session")
def tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """The kind that matters most."""
    return tokenizers["byte_level"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that a gateway can start on: everything but sensible weights."""
    path = save_tokenizer(tmp_path_factory.mktemp("model") / "m", "byte_level")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 500, "eos_token_id": [2]}))
    save_file({"w": np.zeros(4, dtype=np.float32)}, path / "model.safetensors")
    return path


@pytest.fixture(scope="session")
def model_text(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)
