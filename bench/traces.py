"""Public request traces: the Azure LLM inference CSV and the Mooncake JSONL format."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from .errors import BenchError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_LINE_TOKENS = 100_000_000


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace. `hash_ids` names the prompt's blocks: equal ids are equal text (empty: unknown)."""

    at_s: float  # since the first request of the trace
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a whole trace, ordered by time. Raises BenchError naming the file and the line that is malformed."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
            requests = list(_parse(path, numbered))
    except OSError as error:
        raise BenchError(f"cannot read trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BenchError(f"trace {path} is not UTF-8 text") from error
    if not requests:
        raise BenchError(f"trace {path} has no requests")
    first_s = min(request.at_s for request in requests)
    shifted = (TraceRequest(r.at_s - first_s, r.input_tokens, r.output_tokens, r.hash_ids) for r in requests)
    return sorted(shifted, key=lambda request: request.at_s)


def _parse(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[TraceRequest]:
    number, first = next(lines, (0, ""))
    if not first:
        return
    if first.lstrip().startswith("{"):
        parse, rest = _mooncake_line, _chain((number, first), lines)
    elif tuple(cell.strip() for cell in first.lstrip("\ufeff").split(",")) == AZURE_COLUMNS:
        parse, rest = _azure_line, lines
    else:
        raise BenchError(
            f"{path}:{number}: neither a JSON object nor the header {','.join(AZURE_COLUMNS)}: {_shown(first)}"
        )
    for number, line in rest:
        try:
            yield parse(line)
        except (ValueError, RecursionError) as error:
            raise BenchError(f"{path}:{number}: {error}: {_shown(line)}") from error


def _chain(first: tuple[int, str], rest: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _shown(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _azure_line(line: str) -> TraceRequest:
    cells = next(csv.reader([line]))
    if len(cells) != len(AZURE_COLUMNS):
        raise ValueError(f"expected {len(AZURE_COLUMNS)} columns, got {len(cells)}")
    at, context, generated = (cell.strip() for cell in cells)
    moment = datetime.fromisoformat(at)
    # A trace either gives offsets on every line or on none; without one, read it as UTC so that differences are right.
    seconds = (moment if moment.tzinfo else datetime.fromisoformat(at + "+00:00")).timestamp()
    return TraceRequest(seconds, _length("ContextTokens", int(context)), _length("GeneratedTokens", int(generated)))


def _mooncake_line(line: str) -> TraceRequest:
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    timestamp_ms = entry.get("timestamp")
    if isinstance(timestamp_ms, bool) or not isinstance(timestamp_ms, int | float) or not 0 <= timestamp_ms < 1e15:
        raise ValueError("timestamp must be a number of milliseconds")
    hash_ids = entry.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(value) is int for value in hash_ids):
        raise ValueError("hash_ids must be a list of integers")
    return TraceRequest(
        timestamp_ms / 1000,
        _length("input_length", entry.get("input_length")),
        _length("output_length", entry.get("output_length")),
        tuple(hash_ids),
    )


def _length(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_LINE_TOKENS:
        raise ValueError(f"{name} must be a whole number of tokens")
    return value
