"""Tokens ↔ text: equal to Hugging Face on the way in, exact and never half a character on the way out."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.checkpoint import resolve
from pdserve.gateway.api.detokenize import LocalText, WindowText, byte_level_bytes
from pdserve.gateway.api.errors import ApiError
from pdserve.gateway.api.text import ChoiceText, TextOptions, Tokenizer
from pdserve.transfer.errors import CheckpointError, ConfigError

KINDS = [
    "byte_level", "llama_like", "gemma_like", "strips_two", "unigram", "word_piece", "suffix_bpe", "no_decoder",
]  # fmt: skip
TEXTS = [
    "the quick brown fox, the end.",
    "你好、世界 こんにちは 한국어",
    "👩‍👩‍👧 🇩🇪 👍🏽 end",
    "e\u0301 a\u0308\u0323 \u200b\u2028x",
    "real \ufffd stays \ufffd\ufffd",
    "  two  spaces\n\n\ttab\r\n",
    "\U0010ffff\u0000\u0085",
]


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    try:
        return Tokenizer(resolve("demo"))
    except ConfigError as error:
        pytest.skip(str(error))


def pieces(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> list[str]:
    """What each token adds, and what is left at the end."""
    stream = tokenizer.incremental(skip_special_tokens=skip_special_tokens)
    return [*(stream.push(token) for token in ids), stream.flush()]


# --- incremental decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150)
def test_pieces_add_up_to_the_whole_decoding(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(blanks=st.lists(st.sampled_from(["▁", "▁▁", "<0x20>", "</s>", "▁a", "<unk>"]), max_size=6), skip=st.booleans())
@pytest.mark.parametrize("kind", ["llama_like", "strips_two", "unigram"])
def test_pieces_add_up_where_the_text_begins_with_blanks(
    tokenizers: dict[str, Tokenizer], kind: str, blanks: list[str], skip: bool
) -> None:
    tokenizer = tokenizers[kind]
    ids = [tokenizer._backend.token_to_id(piece) for piece in blanks]
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(raw=st.lists(st.sampled_from([0x20, 0x61, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x91, 0x8D, 0xC3, 0xED, 0xFF, 0xF4])))
@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "gemma_like", "unigram"])
def test_pieces_add_up_for_bytes_that_are_nearly_utf8(
    tokenizers: dict[str, Tokenizer], kind: str, raw: list[int]
) -> None:
    tokenizer = tokenizers[kind]
    one_byte = _byte_tokens(tokenizer, kind)
    ids = [one_byte[byte] for byte in raw]
    assert "".join(pieces(tokenizer, ids, True)) == tokenizer.decode(ids, skip_special_tokens=True)


def _byte_tokens(tokenizer: Tokenizer, kind: str) -> dict[int, int]:
    """Token id of each single byte."""
    lookup = tokenizer._piece_lookup(False)
    by_piece = {piece: token for token in range(tokenizer.vocab_size) if (piece := lookup(token)) is not None}
    if kind != "byte_level":
        return {byte: by_piece[f"<0x{byte:02X}>"] for byte in range(256)}
    return {byte_level_bytes(piece)[0]: token for piece, token in by_piece.items() if len(piece) == 1}


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<\u2581")))
@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "gemma_like"])
def test_any_text_survives_the_round_trip_piece_by_piece(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(tokenizer, ids, True)) == whole
    assert whole == text


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_is_shown_as_soon_as_its_character_is_complete(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    shown = ""
    for index, piece in enumerate(pieces(tokenizer, ids, True)[:-1]):
        shown += piece
        so_far = tokenizer.decode(ids[: index + 1], skip_special_tokens=True)
        assert text.startswith(shown)
        assert len(so_far) - len(shown) <= 1, "at most one unfinished character is held back"
    assert shown == text


def test_a_run_of_byte_tokens_is_held_back_because_one_bad_byte_spoils_all_of_it(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["llama_like"]
    byte = _byte_tokens(tokenizer, "llama_like")
    good = [byte[b] for b in "你".encode()]
    word = tokenizer.encode("the")[-1]
    assert pieces(tokenizer, [word, *good, word], True) == ["the", "", "", "", "你the", ""]
    assert pieces(tokenizer, [word, *good, byte[0xFF], word], True) == [
        "the",
        "",
        "",
        "",
        "",
        "\ufffd" * 4 + "the",
        "",
    ]


def test_decoding_a_token_never_looks_at_more_than_a_few_others(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama_like"]
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids, skip_special_tokens=True)

    rng = random.Random(0)
    words = range(3 + 256, tokenizer.vocab_size)
    local = LocalText(decode, tokenizer._piece_lookup(True), True, words[-1])
    window = WindowText(decode, tokenizer._piece_lookup(True))
    for _ in range(500):
        token = rng.choice(words)
        local.push(token)
        window.push(token)
    assert longest <= 16


@pytest.mark.parametrize("text", TEXTS)
def test_demo_tokenizer_streams_exactly_and_without_half_characters(demo: Tokenizer, text: str) -> None:
    ids = demo.encode(text)
    assert "".join(pieces(demo, ids, True)[:-1]) == text


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300)
def test_demo_tokenizer_is_exact_on_random_ids(demo: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49151)), max_size=60))
    assert "".join(pieces(demo, ids, skip)) == demo.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_a_marker_is_text_where_other_special_tokens_are_not(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    marker = tokenizer._backend.token_to_id("<unk>")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.just(marker), max_size=20))
    stream = tokenizer.incremental(skip_special_tokens=True, markers=("<unk>", "<not a token>"))
    text = "".join([*(stream.push(token) for token in ids), stream.flush()])
    assert text.count("<unk>") == ids.count(marker)
    assert "</s>" not in text
    if marker not in ids:
        assert text == tokenizer.decode(ids, skip_special_tokens=True)


# --- finishing -------------------------------------------------------------------------------------------------


def test_a_finishing_stop_token_counts_but_has_no_text(tokenizer: Tokenizer) -> None:
    word, other = tokenizer.encode("the")[-1], tokenizer.encode(" dog")[-1]
    hidden = ChoiceText(tokenizer, TextOptions())
    assert (hidden.push(word, ""), hidden.push(other, "stop"), hidden.num_tokens) == ("the", "", 2)
    kept = ChoiceText(tokenizer, TextOptions(include_stop=True))
    assert kept.push(word, "") + kept.push(other, "stop") == "the" + tokenizer.decode([other], skip_special_tokens=True)


def test_finishing_flushes_held_stop_prefixes_and_half_characters(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("👍")[:-1]
    choice = ChoiceText(tokenizer, TextOptions(stop=("the end of time",)))
    shown = [choice.push(token, "") for token in tokenizer.encode("the end")]
    assert "".join(shown) == ""
    shown += [choice.push(token, "") for token in half[:-1]]
    assert "".join(shown) + choice.push(half[-1], "length") == "the end" + tokenizer.decode(
        half, skip_special_tokens=True
    )


def test_what_is_held_back_comes_out_when_the_end_is_learnt_late(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions(stop=("the end of time",)))
    assert "".join(choice.push(token, "") for token in tokenizer.encode("the end")) == ""
    assert choice.end() == "the end"
    with pytest.raises(AssertionError):
        choice.push(5, "")


# --- encoding and templates -----------------------------------------------------------------------------------


def reference(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))


SPECIAL_TEXT = "tell me </s> and <s> now <|user|> é 你"


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "unigram"])
@pytest.mark.parametrize("text", ["", "the end", SPECIAL_TEXT])
def test_encoding_equals_the_reference(
    tokenizers: dict[str, Tokenizer], tokenizer_dirs: dict[str, Path], kind: str, text: str
) -> None:
    assert tokenizers[kind].encode(text) == reference(tokenizer_dirs[kind])(text).input_ids


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "unigram"])
def test_a_chat_has_exactly_the_reference_tokens_and_one_bos(
    tokenizers: dict[str, Tokenizer], tokenizer_dirs: dict[str, Path], kind: str
) -> None:
    hf = reference(tokenizer_dirs[kind])
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the end?"}]
    ids = tokenizers[kind].encode_chat(messages)
    assert ids == hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids.count(hf.bos_token_id) == 1


def test_special_tokens_in_user_text_are_parsed_as_the_reference_does(
    tokenizer: Tokenizer, tokenizer_dirs: dict[str, Path]
) -> None:
    hf = reference(tokenizer_dirs["byte_level"])
    messages = [{"role": "user", "content": SPECIAL_TEXT}]
    ids = tokenizer.encode_chat(messages)
    assert ids == hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids.count(hf.eos_token_id) == 2


def test_continued_message_is_left_open(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, the"}]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|assistant|>well, the")


def test_template_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}], template_kwargs={"shout": True})
    assert "LOUD" in tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "messages", "tools", "self", "padding"])
def test_parameters_of_the_rendering_call_cannot_be_set_as_template_variables(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(ApiError) as refused:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}], template_kwargs={name: "x"})
    assert (refused.value.status, refused.value.param) == (400, f"chat_template_kwargs.{name}")


@pytest.mark.parametrize("content", ["forbidden", 7, None])
def test_a_template_that_refuses_the_messages_is_a_400_naming_them(tokenizer: Tokenizer, content: object) -> None:
    with pytest.raises(ApiError) as refused:
        tokenizer.encode_chat([{"role": "user", "content": content}])
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_a_model_without_a_template_says_what_to_do(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tokenizer_dirs["byte_level"], bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ApiError, match="--chat-template") as refused:
        Tokenizer(bare).encode_chat([{"role": "user", "content": "hi"}])
    assert refused.value.param == "messages"
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    with_file = Tokenizer(bare, chat_template_file=template)
    assert (
        with_file.decode(with_file.encode_chat([{"role": "user", "content": "hi"}]), skip_special_tokens=True) == "hi!"
    )


def test_files_that_cannot_be_used_are_config_errors(tmp_path: Path, tokenizer_dirs: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        Tokenizer(tokenizer_dirs["byte_level"], chat_template_file=tmp_path / "absent")
    with pytest.raises(CheckpointError):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(CheckpointError):
        Tokenizer(tmp_path)


def test_vocabulary_is_that_of_the_model_when_a_config_says_so(
    tokenizer_dirs: dict[str, Path], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    padded = tmp_path / "padded"
    shutil.copytree(tokenizer_dirs["byte_level"], padded)
    config = {"model_type": "llama", "vocab_size": tokenizer.vocab_size + 64}
    (padded / "config.json").write_text(json.dumps(config))
    assert Tokenizer(padded).vocab_size == tokenizer.vocab_size + 64


def test_threads_may_share_a_tokenizer_whose_file_sets_truncation_and_padding(
    tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "truncating"
    shutil.copytree(tokenizer_dirs["byte_level"], path)
    backend = json.loads((path / "tokenizer.json").read_text())
    backend["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    backend["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<unk>",
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(backend))
    shared, text = Tokenizer(path), "the quick brown fox 你好 " * 50
    assert shared._backend.truncation is None, "settled before any thread encodes: changing it later is the race"
    expected = shared.encode(text)
    assert len(expected) > 64

    def work(seed: int) -> bool:
        chat = shared.encode_chat([{"role": "user", "content": text}])
        stream = shared.incremental(skip_special_tokens=True)
        streamed = "".join(map(stream.push, expected)) + stream.flush()
        return shared.encode(text) == expected and streamed == text and len(chat) > len(expected)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
