"""The incremental JSON scanner agrees with `json.loads`; a call counts as one exactly when it should."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.api.json_stream import CallReader, JsonScanner, Verdict

NASTY = st.text(st.sampled_from(list('{}[]",:\\/ \n-+.0159eEtruefalsn\u00e9u')), max_size=24)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def scan(text: str) -> bool:
    scanner = JsonScanner()
    return all(scanner.push(char) for char in text) and scanner.complete


@given(value=JSON, indent=st.sampled_from([None, 2]), ascii_only=st.booleans())
def test_every_json_value_is_complete_with_its_last_character_and_not_before(
    value: Any, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=ascii_only)
    scanner = JsonScanner()
    for char in text[:-1]:
        assert scanner.push(char)
        assert not scanner.complete
    assert scanner.push(text[-1])
    assert scanner.complete


@given(text=NASTY)
def test_what_is_complete_is_what_json_loads_reads(text: str) -> None:
    text = f"[{text}]"
    try:
        json.loads(text)
    except ValueError:
        valid = False
    else:
        valid = "NaN" not in text and "Infinity" not in text
    assert scan(text) == valid


def read(text: str) -> tuple[Verdict, int, bool, str]:
    """(last verdict, characters that belong to the call, does it count, its arguments)."""
    reader = CallReader({"f"}, ("arguments", "parameters"))
    verdict, taken = Verdict.MORE, 0
    for char in text:
        verdict = reader.push(char)
        taken += verdict in (Verdict.MORE, Verdict.WHOLE)
        if verdict is not Verdict.MORE:
            break
    return verdict, taken, reader.committed, reader.take_arguments() if reader.committed else ""


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": 1, "b": "x}"}}', '{"a": 1, "b": "x}"}'),
        ('{"arguments":{"a" : [1, {}]},\n"name":"f"}', '{"a" : [1, {}]}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "parameters": {}}', "{}"),
        ('{"id": {"name": "g"}, "n\\u0061me": "f", "x": [1, null], "parameters": {"n": -1.5e3}}', '{"n": -1.5e3}'),
    ],
)
def test_a_call_is_whole_and_its_arguments_are_the_models_own_characters(text: str, arguments: str) -> None:
    assert read(text) == (Verdict.WHOLE, len(text), True, arguments)


@pytest.mark.parametrize(
    "text",
    [
        "[1]", "x", "{}", '{"name": "g"}', '{"name": "g", "arguments": {"a": 1}}', '{"name": 5}', '{"name": ["f"]}',
        '{"name": "f", "arguments": "{}"}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": {bad}}',
        '{"name": "f", "arguments": {"a": nope}}', "{'name': 'f'}", '{"name": "f", "name": "f"}',
        '{"arguments": {}, "parameters": {}, "name": "f"}', '{"arguments": {"a": 1}}', '{"name": "f" "x"}',
    ],
)  # fmt: skip
def test_what_is_no_call_never_counts_as_one(text: str) -> None:
    verdict, _, counts, _ = read(text)
    assert (verdict, counts) == (Verdict.NO_CALL, False)


def test_a_call_counts_from_its_first_value_on_and_what_breaks_later_is_told() -> None:
    beginning = '{"name": "f", "arguments": {"a": '
    assert read(beginning)[2] is False
    assert read(beginning + '"')[2] is True
    assert read(beginning + '"x" oops')[:3] == (Verdict.BROKEN, len(beginning) + 4, True)
    assert read(beginning + '"x"}</tool_call>')[:3] == (Verdict.OFF, len(beginning) + 4, True)
