"""An HTTP body as a JSON object, or a 400 that says what is wrong with it."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from .errors import invalid

# Fields of the protocols between this system's processes: a client that sends them means to reach behind the gateway.
INTERNAL_NAMES = frozenset({"kv_transfer_params", "reservation", "attempt"})
INTERNAL_PREFIX = "bootstrap_"

_SURROGATE = re.compile("[\ud800-\udfff]")


def load_object(body: bytes) -> dict[str, Any]:
    """The body's fields, those that are null left out. Raises ApiError 400.

    Refused: anything but UTF-8 and strict JSON (NaN and Infinity are not), nesting deeper than Python can follow,
    unpaired surrogates (no tokenizer can encode them), names of internal fields.
    """
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise invalid(f"The body is not valid UTF-8 (byte {error.start}).", None) from None
    except RecursionError:
        raise invalid("The body is nested too deeply.", None) from None
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}", None) from None
    if not isinstance(fields, dict):
        raise invalid("The body must be a JSON object.", None)
    for name in fields:
        if name in INTERNAL_NAMES or name.startswith(INTERNAL_PREFIX):
            raise invalid(f"{name:.100} is an internal field and cannot be set by a client.", f"{name:.100}")
    if b"\\u" in body:  # UTF-8 itself cannot hold a surrogate, so it came from an escape
        _refuse_surrogates(fields)
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_surrogates(fields: dict[str, Any]) -> None:
    """Iterative, since the nesting is the client's."""
    waiting: list[tuple[str, Any]] = [("", fields)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            if _SURROGATE.search(value):
                raise invalid(f"{path} holds an unpaired surrogate.", path)
        elif isinstance(value, dict):
            for name, inner in value.items():
                if _SURROGATE.search(name):
                    raise invalid("A field's name holds an unpaired surrogate.", path.lstrip(".") or None)
                waiting.append((f"{path}.{name}".lstrip("."), inner))
        elif isinstance(value, list):
            waiting.extend((f"{path}.{index}", inner) for index, inner in enumerate(value))
