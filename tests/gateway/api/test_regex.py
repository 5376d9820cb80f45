"""Expressions that would be read as something else are refused, and no others."""

from __future__ import annotations

import re

import pytest

from pdserve.gateway.api.regex import misread_in


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("a^b", "position 1: ^ can only"), ("x(^a)", "position 2: ^ can only"), ("(a|^b)^c", "position 6: ^"),
        ("a$b", "position 2: nothing can match behind a $"), ("(a$)b", "position 4: nothing"), ("$a", "position 1"),
        ("(a$|c)b", "position 6: nothing"), ("((a$))[b]", "position 6: nothing"), ("a$\\d", "position 2: nothing"),
        ("a$*", "position 1: $ cannot be repeated"), ("^*a", "position 0: ^ cannot be repeated"),
        ("(^a)+", "position 3: what holds an anchor"), ("((a$)){2}", "position 5: what holds"),
        (r"\Aab", r"position 0: the escape \A is not known"), (r"ab\Z", r"position 2: the escape \Z"), (r"\z", "0"),
        (r"\h", "escape"), (r"\i", "escape"), (r"\x{41}", r"escape \x is"), (r"\x4", "escape"), (r"\u41", "escape"),
        (r"[\B]", "escape"), (r"[\p{L}]", "escape"), (r"[\A]", "escape"), (r"[\1]", "escape"),
        (r"[\^a]", "position 1: an escaped ^"), (r"b[\x5ea]", "position 2"), (r"[\u{5e}]", "position 1"),
        (r"\ud83d", "is no character"), (r"\u{110000}", "is no character"),
    ],
)  # fmt: skip
def test_what_would_be_read_otherwise_is_named(pattern: str, fault: str) -> None:
    assert fault in misread_in(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "", "^a$", "^a$|^b$", "(^a|^b)c", "((^a)|b)c", "(a$|b$)", "(a|b$)", "^(?:^a|b)$", "^^a$$", "a(?:b(?P<x>c$))",
        r"\^a\$", "[$^]", "[a^$]", r"[a\^]", r"[^\^]", "[^^]", r"[\]^]", r"(\(a\))*", r"\d{3}-\d{4}", r"[\b\d\-\w]",
        r"\x41\u00e9\u{1F600}\cA\n\t\0", r"\.\-\/\_\é\ ", "(?<n>a)+", "a{2,}?", r"[\x41\x5e]", "(a", "a)", "[a", "a\\",
    ],
)  # fmt: skip
def test_what_is_read_as_it_is_meant_passes(pattern: str) -> None:
    assert misread_in(pattern) == ""


def test_a_long_expression_is_read_once() -> None:
    assert misread_in("(a|[b-c]\\d)" * 20_000) == ""
    assert misread_in("(" * 100_000) == ""
    assert re.match("position 200000", misread_in("(" * 100_000 + ")" * 100_000 + "^"))
