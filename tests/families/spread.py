"""A source of random choices whose first few seeds are as unlike each other as can be."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Spread(random.Random):
    """Spreads ``choice`` evenly over seeds: n seeds in a row take each of n options once.

    Three independent draws of "tied or not" are all the same in a quarter of all cases. Here each
    choice of a model's configuration is a shuffled round through its options, and the seed says
    how far along all rounds are (a Latin hypercube).

    Args:
        name: What is drawn; another name shuffles the rounds differently.
        seed: From 0.
    """

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(f"{name} {seed}")
        self._name = name
        self._seed = seed
        self._asked: dict[str, int] = {}

    def choice(self, seq: Sequence[Any]) -> Any:
        """Return one of ``seq``: the same question has its answers in turn."""
        question = repr(seq)
        count = self._asked[question] = self._asked.get(question, 0) + 1
        order = list(seq)
        random.Random(f"{self._name} {question} {count}").shuffle(order)
        return order[self._seed % len(order)]
