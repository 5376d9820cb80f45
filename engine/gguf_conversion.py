"""Turn a GGUF file into a model directory, through transformers: float32 weights, tokenizer, chat template."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from ..transfer.errors import CheckpointError

FLOAT32_BYTES = 4


def convert(gguf: Path, directory: Path) -> None:
    """Fill the existing, empty `directory` with the model in `gguf`, showing a progress bar on stderr.

    Raises CheckpointError for a file that is corrupt or of an architecture transformers cannot read from GGUF,
    and when the disk has no room for it.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with bar, _library_bars_off():
        task = bar.add_task(f"{gguf.name}: reading")
        num_tensors = _check(gguf, directory)
        bar.update(task, total=2 * num_tensors, description=f"{gguf.name}: converting weights")
        try:
            with _on_each_tensor(lambda: bar.advance(task)):
                model = AutoModelForCausalLM.from_pretrained(
                    gguf.parent,
                    gguf_file=gguf.name,
                    dtype=torch.float32,
                    quantization_config=GgufConfig(dequantize=True),
                )
            bar.update(task, description=f"{gguf.name}: writing weights")
            model.save_pretrained(directory)
            bar.update(task, completed=1.5 * num_tensors, description=f"{gguf.name}: converting the tokenizer")
            AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
        except OSError:
            raise
        except Exception as error:  # the parsers raise whatever a wrong byte led them to; the cause is kept
            raise CheckpointError(f"{gguf} cannot be converted: {_first_line(error)}") from error
        _make_as_readable_as_config(directory)
        bar.update(task, completed=2 * num_tensors, description=f"{gguf.name}: converted")


def _check(gguf: Path, directory: Path) -> int:
    """How many tensors the file has, after making sure that it is whole and that its float32 form fits the disk."""
    try:
        tensors = GGUFReader(gguf).tensors
    except Exception as error:  # as above: GGUFReader trusts every length it reads
        raise CheckpointError(f"{gguf} is corrupt or truncated: {_first_line(error)}") from error
    if not tensors:
        raise CheckpointError(f"{gguf} is corrupt: it holds no tensors")
    needed = sum(int(tensor.n_elements) for tensor in tensors) * FLOAT32_BYTES
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CheckpointError(f"{gguf} needs {needed >> 20} MiB in {directory.parent}, which has {free >> 20} MiB free")
    return len(tensors)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


@contextmanager
def _library_bars_off() -> Iterator[None]:
    bars: Any = transformers_logging  # untyped
    were_on = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            bars.enable_progress_bar()


@contextmanager
def _on_each_tensor(advance: Callable[[], None]) -> Iterator[None]:
    """Call `advance` after each tensor that transformers dequantises.

    It takes no callback and draws a bar of its own that has no switch, so this stands in for that bar.
    """
    library: Any = modeling_gguf_pytorch_utils
    original = library.tqdm

    def count(items: Iterable[Any], **_: object) -> Iterator[Any]:
        for item in items:
            yield item
            advance()

    library.tqdm = count
    try:
        yield
    finally:
        library.tqdm = original


def _make_as_readable_as_config(directory: Path) -> None:
    """safetensors writes for the owner's eyes only; a cache shared between users follows the umask."""
    for weights in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", weights)
