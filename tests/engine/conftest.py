"""Model directories without a model: what `engine.checkpoint` looks at, in a few hundred kilobytes."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The smallest directory that looks like a model."""
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    write_json(directory / "config.json", {"model_type": "llama", "transformers_version": "5.0.0"})
    write_json(directory / "generation_config.json", {"eos_token_id": 2})
    write_json(directory / "tokenizer.json", {"model": {"vocab": {"a": 0}}})
    write_json(directory / "tokenizer_config.json", {"eos_token": "a"})
    save_file({"w": np.arange(100_000, dtype=np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def sharded(model: Path) -> Path:
    (model / "model.safetensors").unlink()
    names = {f"w{i}": f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)}
    for tensor, shard in names.items():
        save_file({tensor: np.ones(10, dtype=np.float32)}, model / shard)
    write_json(model / "model.safetensors.index.json", {"weight_map": names})
    return model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
