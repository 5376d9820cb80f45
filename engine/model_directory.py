"""Is this a model directory that can be loaded? Told in milliseconds, before anything is loaded. Torch-free."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ..transfer.errors import CheckpointError

SINGLE_WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

_OTHER_WEIGHTS = ("*.gguf", "*.safetensors", "pytorch_model*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack")
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its JSON header, little endian
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_LFS_POINTER = b"version https://git-lfs"
_SHARD_NAME = re.compile(r"[^/\\]+\.safetensors")


def check_model_directory(directory: Path) -> None:
    """Raise CheckpointError, naming the file, unless config, tokenizer and complete weights are all there."""
    config = read_json(directory / "config.json")
    if "model_type" not in config:
        raise CheckpointError(f"{directory / 'config.json'} names no model_type, so it is not a transformers model")
    vocabularies = [directory / name for name in TOKENIZER_VOCABULARIES if (directory / name).is_file()]
    vocabularies += sorted(directory.glob("*.tiktoken"))
    if not vocabularies:
        raise CheckpointError(f"{directory} has no tokenizer: none of {', '.join(TOKENIZER_VOCABULARIES)} is there")
    for vocabulary in vocabularies:
        _check_text_is_whole(vocabulary)
    placed = _tensors_by_shard(directory)
    for name, tensors in placed.items():
        missing = tensors - tensor_names(directory / name)
        if missing:
            raise CheckpointError(
                f"{directory / name} lacks the tensor {min(missing)} that {WEIGHTS_INDEX} places there"
            )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files transformers would load, sorted by name. Raises CheckpointError if there are none."""
    return [directory / name for name in sorted(_tensors_by_shard(directory))]


def _tensors_by_shard(directory: Path) -> dict[str, set[str]]:
    """Tensors that each weight file must hold at least; a single file promises nothing in advance."""
    if (directory / SINGLE_WEIGHTS).is_file():  # transformers, too, prefers it to an index
        return {SINGLE_WEIGHTS: set()}
    index = directory / WEIGHTS_INDEX
    if not index.is_file():
        others = sorted({path.name for pattern in _OTHER_WEIGHTS for path in directory.glob(pattern)})
        found = f"; {others[0]} there cannot be used as one" if others else ""
        if others and others[0].endswith(".gguf"):
            found = f"; to serve {others[0]}, give the path of that file"
        raise CheckpointError(f"{directory} has no {SINGLE_WEIGHTS} or {WEIGHTS_INDEX}{found}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    placed: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(f"{index} places {tensor} in {shard!r}, which is not a safetensors file name")
        placed.setdefault(shard, set()).add(tensor)
    return placed


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`. Raises CheckpointError when it is missing or is anything else."""
    try:
        value: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _check_text_is_whole(vocabulary: Path) -> None:
    """Catch what downloads leave behind: empty files, Git LFS pointers, JSON that breaks off."""
    try:
        content = vocabulary.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{vocabulary} cannot be read: {error.strerror}") from None
    if content.startswith(_LFS_POINTER):
        raise CheckpointError(f"{vocabulary} is a Git LFS pointer, not the file itself: run `git lfs pull`")
    text = content.strip()
    if not text:
        raise CheckpointError(f"{vocabulary} is empty")
    if vocabulary.suffix == ".json" and not (text.startswith(b"{") and text.endswith(b"}")):
        raise CheckpointError(f"{vocabulary} is truncated or not a JSON object")


def safetensors_header(path: Path) -> tuple[dict[str, object], int]:
    """The parsed header of a safetensors file, and how many bytes it takes, its length field included.

    Raises CheckpointError when the file is missing, unreadable, or too short even for its header.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            size = path.stat().st_size
            text = file.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}, which {WEIGHTS_INDEX} lists") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if prefix.startswith(_LFS_POINTER[:_LENGTH_BYTES]):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`")
    if len(prefix) < _LENGTH_BYTES or len(text) < length or length > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} is truncated or not a safetensors file: {size} bytes, header of {length}")
    try:
        header: object = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is corrupt: its header is not a JSON object")
    return header, _LENGTH_BYTES + length


def tensor_names(path: Path) -> set[str]:
    """Names of the tensors in a safetensors file whose size is exactly what its header says, else CheckpointError."""
    header, header_bytes = safetensors_header(path)
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if not tensors:
        raise CheckpointError(f"{path} is corrupt: it holds no tensors")
    data_bytes = 0
    for name, entry in tensors.items():
        match entry:
            case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end:
                data_bytes = max(data_bytes, end)
            case _:
                raise CheckpointError(f"{path} is corrupt: its header gives no place for the tensor {name}")
    size, expected = path.stat().st_size, header_bytes + data_bytes
    if size != expected:
        state = "truncated" if size < expected else "corrupt"
        raise CheckpointError(f"{path} is {state}: {size} bytes, its header promises {expected}")
    return set(tensors)
