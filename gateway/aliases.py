"""Names that stand for one of several models, by weight: for A/B tests, and for a new version's first few users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

HASH_BITS = 64
MAX_WEIGHT = 1_000_000


class BadWeights(ValueError):
    """Weights that cannot be, in words."""


@dataclass(frozen=True)
class Alias:
    """`weights`: model → its share of the users, as far as weights go; in the order in which they were given."""

    name: str
    weights: Mapping[str, int]

    def choose(self, key: str) -> str:
        """The model of whoever bears `key`, always the same for the same weights.

        Each has a place on a line that the models share in order, by weight. So when two models' weights shift, only
        those between the old and the new border move.
        """
        digest = blake2b(f"{self.name}\0{key}".encode(), digest_size=HASH_BITS // 8).digest()
        place = int.from_bytes(digest) * sum(self.weights.values()) >> HASH_BITS
        for model, weight in self.weights.items():
            if place < weight:
                return model
            place -= weight
        raise AssertionError("weights add up to more than 0")


def check_weights(weights: Mapping[str, Any], models: Mapping[str, object]) -> dict[str, int]:
    """The weights, if every one belongs to a model that is served. Raises BadWeights."""
    for model, weight in weights.items():
        if model not in models:
            raise BadWeights(f"there is no model {model!r:.200} here; there are {', '.join(models)}")
        if type(weight) is not int or not 0 <= weight <= MAX_WEIGHT:
            raise BadWeights(f"the weight of {model} must be a whole number from 0 to {MAX_WEIGHT}")
    if not any(weights.values()):
        raise BadWeights("at least one weight must be more than 0")
    return dict(weights)
