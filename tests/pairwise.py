"""A few cases of a product of parameters, in which every pair of values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise_places(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of the ``cases`` to take, so that every pair of values of two parameters occurs which occurs at all."""
    pairs = [set(itertools.combinations(case.items(), 2)) for case in cases]
    missing = set[Any]().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda place: len(pairs[place] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
