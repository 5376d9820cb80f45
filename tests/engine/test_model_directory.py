"""What makes a directory a model, and the one line that says what is wrong with another."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.engine.model_directory import check_model_directory
from pdserve.transfer.errors import CheckpointError


def refusal(directory: Path) -> str:
    """The one line with which `directory` is refused."""
    with pytest.raises(CheckpointError) as caught:
        check_model_directory(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_whole_directory_is_accepted(model: Path) -> None:
    check_model_directory(model)


def test_whole_sharded_directory_is_accepted(sharded: Path) -> None:
    check_model_directory(sharded)


def test_weights_in_another_format_beside_the_single_file_do_not_matter(model: Path) -> None:
    (model / "consolidated.safetensors").write_bytes(b"not looked at")
    check_model_directory(model)


def cut(name: str, keep_bytes: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[:keep_bytes])

    return damage


def put(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(content) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


def header_only(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("config.json"), ["config.json"]),
        (put("config.json", b"{"), ["config.json", "not valid JSON"]),
        (put("config.json", b"[]"), ["config.json", "not a JSON object"]),
        (put("config.json", b"\xff\xfe\x00"), ["config.json", "not valid JSON"]),
        (put("config.json", b"[" * 200_000), ["config.json", "not valid JSON"]),
        (put("config.json", b"{}"), ["config.json", "model_type"]),
        (remove("tokenizer.json"), ["no tokenizer", "tokenizer.json"]),
        (put("tokenizer.json", b""), ["tokenizer.json", "empty"]),
        (cut("tokenizer.json", 10), ["tokenizer.json", "truncated"]),
        (put("tokenizer.json", LFS_POINTER), ["tokenizer.json", "git lfs pull"]),
        (remove("model.safetensors"), ["no model.safetensors"]),
        (cut("model.safetensors", 0), ["model.safetensors", "truncated"]),
        (cut("model.safetensors", 7), ["model.safetensors", "truncated"]),
        (cut("model.safetensors", 30), ["model.safetensors", "truncated"]),
        (cut("model.safetensors", 300_000), ["model.safetensors", "truncated: 300000 bytes"]),
        (put("model.safetensors", LFS_POINTER), ["model.safetensors", "git lfs pull"]),
        (put("model.safetensors", b"\xff" * 64), ["model.safetensors", "not a safetensors file"]),
        (put("model.safetensors", header_only(b"{}")), ["model.safetensors", "no tensors"]),
        (put("model.safetensors", header_only(b"[1]")), ["model.safetensors", "header"]),
        (put("model.safetensors", header_only(b'{"w": 1}')), ["model.safetensors", "tensor w"]),
        (put("model.safetensors", header_only(b'{"w": {"data_offsets": [8, 4]}}')), ["model.safetensors", "tensor w"]),
        (put("model.safetensors", header_only(b'{"w": {"data_offsets": [0, 4]}}', b"12345")), ["corrupt: 44 bytes"]),
    ],
)
def test_damaged_directory_is_refused_in_one_line_naming_the_file(
    model: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(model)
    text = refusal(model)
    assert all(word in text for word in [str(model), *words]), text


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("model-00002-of-00003.safetensors"), ["model-00002-of-00003.safetensors", "index"]),
        (cut("model-00003-of-00003.safetensors", 80), ["model-00003-of-00003.safetensors", "truncated"]),
        (put("model.safetensors.index.json", b"{}"), ["model.safetensors.index.json", "weight_map"]),
        (put("model.safetensors.index.json", b'{"weight_map": {"w1": "../x.safetensors"}}'), ["'../x.safetensors'"]),
        (put("model.safetensors.index.json", b'{"weight_map": {"w1": 3}}'), ["not a safetensors file name"]),
        (
            put("model.safetensors.index.json", b'{"weight_map": {"w9": "model-00001-of-00003.safetensors"}}'),
            ["model-00001-of-00003.safetensors", "w9"],
        ),
    ],
)
def test_damaged_shards_are_refused_in_one_line_naming_the_file(
    sharded: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(sharded)
    text = refusal(sharded)
    assert all(word in text for word in [str(sharded), *words]), text


def test_weights_that_cannot_be_used_are_named_in_the_refusal(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in refusal(model)
    (model / "pytorch_model.bin").rename(model / "some.gguf")
    assert "to serve some.gguf, give the path of that file" in refusal(model)
