"""GGUF files as model directories: each is converted once, into the user's cache. Torch-free.

Life of a conversion, all under a file lock of its own, so that processes starting together convert once:

    leftovers of killed conversions are removed → `.partial-<key>` is written → checked → renamed to `<key>`

The kernel drops the lock of a process that dies, and nothing but a finished directory ever bears the final name.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..transfer.errors import CheckpointError
from .file_sample import add_sample
from .model_directory import check_model_directory

logger = logging.getLogger(__name__)

CONVERSION_VERSION = 1  # raise it when the converter changes, so that old results are not used
_MAGIC = b"GGUF"


def cache_directory() -> Path:
    """Where pdserve keeps what it made: $PDSERVE_CACHE, else pdserve/ in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("PDSERVE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")  # the specification says to ignore it unless absolute
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "pdserve"


def converted(gguf: Path) -> Path:
    """The model directory made from `gguf`, converting it if that has not been done. Raises CheckpointError."""
    models = cache_directory() / "models"
    directory = models / _key(gguf)
    if directory.is_dir() and _is_whole(directory):
        return directory
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{directory.name}.lock"):
            if not (directory.is_dir() and _is_whole(directory)):  # another process may have made it meanwhile
                _convert_into(directory, gguf)
    except OSError as error:
        raise CheckpointError(f"cannot write the converted {gguf.name} below {models}: {error.strerror}") from error
    return directory


def _key(gguf: Path) -> str:
    """Directory name of what `gguf` becomes: readable, and different when the content is."""
    digest = hashlib.sha256(f"conversion {CONVERSION_VERSION}".encode())
    try:
        with gguf.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{gguf} is not a GGUF file")
        add_sample(digest, gguf)
    except OSError as error:
        raise CheckpointError(f"{gguf} cannot be read: {error.strerror}") from None
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', gguf.stem)[:100]}-{digest.hexdigest()[:16]}"


def _is_whole(directory: Path) -> bool:
    try:
        check_model_directory(directory)
    except CheckpointError as error:  # a full disk, a power cut or a cleaner may have damaged it
        logger.warning("converting again: %s", error)
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`. The wait has no limit but ends when the holder finishes or dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is converting the same model (%s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(directory: Path, gguf: Path) -> None:
    # Imported here because it brings torch and transformers, which the gateway must not load to find its model.
    from .gguf_conversion import convert

    partial = directory.with_name(f".partial-{directory.name}")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process: nobody else works on it, we hold the lock
    logger.info("converting %s, once, into %s", gguf.name, directory)
    try:
        partial.mkdir()
        convert(gguf, partial)
        check_model_directory(partial)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
