"""The same weights for every engine: a directory in Hugging Face's layout, and a GGUF file, both in float32.

The directory is what pdserve itself makes of a GGUF file. The other is made once, by the `llama-quantize` beside the
server, and kept in the cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

from tokenizers import Tokenizer

from ..engine.checkpoint import DEMO, demo_gguf, resolve
from ..engine.gguf_cache import cache_directory
from ..transfer.errors import ConfigError
from .errors import BenchError

QUANTIZE = "llama-quantize"
QUANTIZE_TIMEOUT_S = 600.0


def model_directory(model: str) -> Path:
    """Raises BenchError when there is no such model."""
    try:
        return resolve(model)
    except ConfigError as error:
        raise BenchError(f"--model: {error}") from error


def tokenizer_of(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


async def float32_gguf(model: str, server: str) -> Path:
    """`model` (a GGUF file, or the demo) with its weights in float32. `server`: the program that will load it.

    Raises BenchError when it cannot be made.
    """
    source = demo_gguf() if model == DEMO else Path(model)
    if source.suffix != ".gguf":
        raise BenchError(f"{model} is no GGUF file: give llama.cpp one with --gguf FILE")
    key = hashlib.sha256(f"{source.resolve()} {source.stat().st_size} {source.stat().st_mtime_ns}".encode())
    made = cache_directory() / "bench" / f"{source.stem}-{key.hexdigest()[:12]}-F32.gguf"
    if made.is_file():
        return made
    program = Path(server).with_name(QUANTIZE)
    partial = made.with_name(f".partial-{os.getpid()}-{made.name}")
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        await _run(str(program), "--allow-requantize", str(source), str(partial), "F32")
        partial.rename(made)
    except OSError as error:
        raise BenchError(f"cannot make {made} with {program}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return made


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(QUANTIZE_TIMEOUT_S):
            output, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        last = output.decode(errors="replace").strip().splitlines()[-1:]
        raise BenchError(f"{command[0]} failed with code {process.returncode}: {' '.join(last)}")
