"""An HTTP body as a JSON object, or a 400 that says what is wrong with it."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from .errors import invalid

# Fields of the protocols between this system's processes: a client that sends them means to reach behind the gateway.
INTERNAL_NAMES = frozenset({"kv_transfer_params", "reservation", "attempt"})
INTERNAL_PREFIX = "bootstrap_"

MAX_NESTING = 128  # levels; everything behind the parser may follow them by recursion

_SURROGATE = re.compile("[\ud800-\udfff]")


class BadJson(ValueError):
    """What is wrong with a text, as a predicate; `path` says where in it ("": it as a whole)."""

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(what)
        self.path = path


def load_json(text: str) -> Any:
    """Any JSON value, also one that came as a string within a body. Raises BadJson.

    Refused: what is not strict JSON (NaN and Infinity are not), more than MAX_NESTING levels, unpaired surrogates (no
    tokenizer can encode them).
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadJson(f"is nested more than {MAX_NESTING} levels deep") from None
    except ValueError as error:
        raise BadJson(f"is not valid JSON: {error}") from None
    if text.count("[") + text.count("{") > MAX_NESTING:
        _refuse_nesting(value)
    if "\\u" in text and isinstance(value, (str, dict, list)):
        _refuse_surrogates(value)
    return value


def load_object(body: bytes) -> dict[str, Any]:
    """The body's fields, those that are null left out. Raises ApiError 400.

    Refused: anything but UTF-8, what `load_json` refuses, names of internal fields.
    """
    try:
        fields = load_json(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise invalid(f"The body is not valid UTF-8 (byte {error.start}).", None) from None
    except BadJson as error:
        raise invalid(f"{error.path or 'The body'} {error}.", error.path or None) from None
    if not isinstance(fields, dict):
        raise invalid("The body must be a JSON object.", None)
    for name in fields:
        if name in INTERNAL_NAMES or name.startswith(INTERNAL_PREFIX):
            raise invalid(f"{name:.100} is an internal field and cannot be set by a client.", f"{name:.100}")
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_nesting(value: Any) -> None:
    """Iterative, since the nesting is the client's; of a path the first step is enough to find the place."""
    if not isinstance(value, (dict, list)):
        return
    for name, member in value.items() if isinstance(value, dict) else enumerate(value):
        inside = [iter([member])]
        while inside:
            inner = next((one for one in inside[-1] if isinstance(one, (dict, list))), None)
            if inner is None:
                inside.pop()
            elif len(inside) == MAX_NESTING:
                raise BadJson(f"is nested more than {MAX_NESTING} levels deep", str(name))
            else:
                inside.append(iter(inner.values() if isinstance(inner, dict) else inner))


def _refuse_surrogates(value: Any) -> None:
    """Iterative, since the nesting is the client's."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            if _SURROGATE.search(value):
                raise BadJson("holds an unpaired surrogate", path)
            continue
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in members:
            if isinstance(name, str) and _SURROGATE.search(name):
                raise BadJson("has a field whose name holds an unpaired surrogate", path)
            if isinstance(inner, (str, dict, list)):
                waiting.append((f"{path}.{name}".lstrip("."), inner))
