"""Random JSON schemas of the kind that people write, for tests of structured output."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "tags", "city", "kind", "size", "note", "left", "right", "item")
WORDS = ("red", "green", "blue", "small", "large", "yes", "no", 'a "quoted" word', "über", "tab\there")
PATTERNS = ("^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{3}$", "^(yes|no|maybe)$", "^[0-9]{4}-[0-9]{2}$", "^a+b?$")


def random_schema(seed: int) -> dict[str, Any]:
    """An object at the root, as tools and response formats have it."""
    return _object(random.Random(seed), depth=0)


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_string, _pattern, _integer, _number, _enum, _const, _literal)
    nests = (_object, _array, _union)
    return rng.choice(leaves if depth > 2 else (*leaves, *nests))(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth + 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(4, 24)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 5000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-100, 100) / 4
    return {"type": "number", "exclusiveMinimum": least, "maximum": least + rng.randint(1, 40) / 4}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, 2.5, None, True], rng.randint(1, 5))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(WORDS)}


def _literal(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}
