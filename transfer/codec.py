"""Messages as frames and back: msgpack maps `{"v": schema version, "t": message name, ...fields}`, no pickle.

Behind the map stands its XXH3-64, so that a bit that flipped on the way is found before anybody believes a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import msgpack
import xxhash
from pydantic import TypeAdapter, ValidationError

from .errors import ProtocolError
from .messages import MESSAGES, Message, Slab

SCHEMA_VERSION = 4
MAX_HEADER_BYTES = 64 * 1024 * 1024
SEAL_BYTES = 8

_ADAPTERS: dict[str, TypeAdapter[Message]] = {kind: TypeAdapter(cls) for kind, cls in MESSAGES.items()}
_names_of: Callable[[type], tuple[str, ...]] = cache(lambda cls: tuple(field.name for field in fields(cls)))


def _plain(value: object) -> dict[str, object]:
    """msgpack hook: nested dataclasses become maps."""
    return {name: getattr(value, name) for name in _names_of(type(value))}


_pack: Callable[..., bytes] = msgpack.packb


def encode(message: Message) -> bytes:
    """One message as the bytes of its header frame."""
    body: dict[str, object] = {"v": SCHEMA_VERSION, "t": message.kind}
    body.update(_plain(message))
    return seal(_pack(body, default=_plain, use_bin_type=True))


def seal(body: bytes) -> bytes:
    """A frame: the body and its checksum (big-endian)."""
    return body + xxhash.xxh3_64_digest(body)


def parts_after(message: Message) -> int:
    """How many more parts a message has than its header."""
    return 1 if isinstance(message, Slab) and message.span is None else 0


def decode(frame: bytes | memoryview) -> Message:
    """The message in a header frame. Raises ProtocolError for anything else."""
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError("oversize", f"{len(frame)} bytes")
    content = frame[:-SEAL_BYTES]
    if xxhash.xxh3_64_digest(content) != bytes(frame[-SEAL_BYTES:]):
        raise ProtocolError("checksum", f"{len(frame)} bytes")
    try:
        body: Any = msgpack.unpackb(content, raw=False, strict_map_key=False, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError("malformed", str(error)[:200]) from None
    if not isinstance(body, dict):
        raise ProtocolError("malformed", "not a map")
    if (version := body.pop("v", None)) != SCHEMA_VERSION:
        raise ProtocolError("version", f"{version!r:.40} is not {SCHEMA_VERSION}")
    kind = body.pop("t", None)
    cls = MESSAGES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError("unknown_message", f"{kind!r:.80}")
    try:
        return _ADAPTERS[cls.kind].validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError("invalid_field", f"{kind}.{where}: {first['msg']}") from None
