"""Prompts for the exactness suites: own words, made by rule, the same on every machine.

Real text leaves the model sure of most tokens; tables, code and names in an odd order make it less so, and that is
where an error in positions, masks or block tables shows first. So each document mixes the kinds.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def _words(line: str) -> list[str]:
    return line.split()


PEOPLE = _words("Amara Bruno Chen Dalia Emeka Farida Goran Hana Ivo Jun Kofi Lena Mateus Noor Otto Priya")
PLACES = _words(
    "harbour library orchard workshop railway-yard observatory bakery clinic quarry theatre lighthouse mill"
)
THINGS = _words("ledger telescope kettle compass loom lantern bicycle barometer piano map ladder clock")
DEEDS = _words("repaired borrowed measured painted sold hid described weighed carried forgot drew returned")
MOODS = _words("quietly at-once without-asking before-dawn in-the-rain twice by-mistake with-great-care")
REASONS = (
    "because the tide would not wait",
    "although nobody had asked for it",
    "so that the evening class could begin on time",
    "while the others argued about the price of coal",
    "after reading the same letter for the third time",
    "since the old one had been lost on the way",
)
VERBS = _words("load merge filter rank split count shift trim")
NOUNS = _words("rows words edges samples prices tokens paths marks")


def _sentence(rng: random.Random) -> str:
    who, whom = rng.sample(PEOPLE, 2)
    place, thing = rng.choice(PLACES), rng.choice(THINGS)
    deed, mood = rng.choice(DEEDS), rng.choice(MOODS).replace("-", " ")
    shape = rng.randrange(4)
    if shape == 0:
        return f"{who} {deed} the {thing} near the {place} {mood}, {rng.choice(REASONS)}."
    if shape == 1:
        return f"At the {place}, {whom} told {who} that the {thing} had cost {rng.randrange(3, 900)} crowns."
    if shape == 2:
        return f'"Who {deed} my {thing}?" asked {who}, and {whom} pointed {mood} towards the {place}.'
    return f"On day {rng.randrange(1, 366)} the {place} stayed closed {rng.choice(REASONS)}; {who} went home {mood}."


def paragraph(rng: random.Random) -> str:
    return " ".join(_sentence(rng) for _ in range(rng.randrange(4, 8))) + "\n\n"


def table(rng: random.Random) -> str:
    lines = [f"| {rng.choice(NOUNS)} | {rng.choice(PLACES)} | year | share |", "|---|---|---|---|"]
    lines += [
        f"| {rng.randrange(100_000)} | {rng.choice(PEOPLE)} | {rng.randrange(1890, 2030)} | {rng.random():.3f} |"
        for _ in range(rng.randrange(4, 9))
    ]
    return "\n".join(lines) + "\n\n"


def code(rng: random.Random) -> str:
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    limit, step = rng.randrange(10, 500), rng.randrange(2, 9)
    return (
        f"```python\ndef {verb}_{noun}({noun}: list[int], limit: int = {limit}) -> list[int]:\n"
        f'    """{verb.title()} {noun} below {limit}, every {step}th one."""\n    kept = []\n'
        f"    for position, value in enumerate({noun}):\n"
        f"        if value < limit and position % {step} == {rng.randrange(step)}:\n"
        f"            kept.append(value * {rng.randrange(2, 40)})\n    return kept\n```\n\n"
    )


def letter(rng: random.Random) -> str:
    """Characters of more than one byte, so that block and chunk borders fall inside them."""
    who, whom = rng.sample(PEOPLE, 2)
    return (
        f"Liebe {who}, cher {whom}: the café «Übermut» owes us {rng.randrange(10, 99)} € - naïve, but true. "
        f"{rng.choice(['Grüße', 'À bientôt', 'Ευχαριστώ', 'ありがとう', 'Спасибо'])} 🙂 ({rng.randrange(10_000)})\n\n"
    )


KINDS: tuple[Callable[[random.Random], str], ...] = (paragraph, table, code, letter)

TASKS = (
    "Summarise the text above in three sentences.",
    "Which names appear in the text, and what did each of them do?",
    "Continue the text in the same style.",
    "Explain what the last function or table above shows.",
    "Write down two questions that the text leaves open, and answer them.",
)


def document(seed: int, num_chars: int, weights: tuple[int, int, int, int]) -> str:
    """About `num_chars` characters; `weights` mixes paragraphs, tables, code and letters."""
    rng = random.Random(seed)
    parts: list[str] = []
    while sum(map(len, parts)) < num_chars:
        parts.append(rng.choices(KINDS, weights)[0](rng))
    return "".join(parts) + rng.choice(TASKS)


# (seed, characters, mix): with the demo's tokenizer between 1,000 and 3,000 tokens each, in mixed order of length.
LONG_DOCUMENTS: tuple[tuple[int, int, tuple[int, int, int, int]], ...] = (
    (101, 4300, (1, 0, 0, 0)),
    (102, 3400, (1, 1, 1, 1)),
    (103, 7000, (3, 0, 1, 1)),
    (104, 3300, (0, 1, 2, 0)),
    (105, 10600, (4, 1, 0, 1)),
    (106, 4000, (2, 1, 1, 0)),
    (107, 2700, (0, 3, 0, 1)),
    (108, 5600, (2, 0, 2, 1)),
    (109, 4600, (1, 1, 0, 2)),
    (110, 3900, (1, 0, 2, 0)),
)


@dataclass(frozen=True)
class Prompt:
    """One user turn, named for the reports."""

    name: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def short_prompts() -> list[Prompt]:
    """Six own prompts of which one has some 750 tokens: the set of the quick suite."""
    texts = (
        "Why is the sky blue at noon and red in the evening?",
        "Write a Python function that returns the n-th Fibonacci number without recursion.",
        "List five uses of an old bicycle wheel.",
        "Translate into German: the lighthouse keeper forgot the ledger in the bakery.",
        document(11, 500, (1, 1, 0, 1)),
        document(12, 1050, (2, 1, 1, 1)),
    )
    return [Prompt(f"short-{number}", text) for number, text in enumerate(texts)]


def long_prompts() -> list[Prompt]:
    """Ten own prompts of 1,000 to 3,000 tokens."""
    return [Prompt(f"long-{seed}", document(seed, chars, mix)) for seed, chars, mix in LONG_DOCUMENTS]


def shared_directory() -> Path:
    """Where data lies that is not part of this repository ($PDSERVE_SHARED, else beside the repository)."""
    return Path(os.environ.get("PDSERVE_SHARED") or REPOSITORY.parent / "shared")


def mt_bench_file() -> Path:
    return shared_directory() / "prompts" / "mt_bench_question.jsonl"


def mt_bench_prompts() -> Iterator[Prompt]:
    """The first turn of every question of MT-Bench. Raises FileNotFoundError where the file is absent."""
    with mt_bench_file().open(encoding="utf-8") as lines:
        for line in lines:
            question = json.loads(line)
            yield Prompt(f"mt-bench-{question['question_id']}", question["turns"][0])
