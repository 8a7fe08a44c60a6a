"""How the clocks of ranks differ, from messages that all of them wait for. Arithmetic on seconds.

In each round a rank notes its clock, takes part in a message of all, and notes its clock again. No rank can have it
before the last has come: the beginning on one rank is before the end on any other. With o what is to be added to a
rank's clock, for every round::

    begin[r] + o <= end[0]      begin[0] <= end[r] + o

Each round bounds o from both sides, and the tightest bounds of all rounds count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Offset(NamedTuple):
    """What is to be added to a rank's clock to get that of rank 0: right to ``error`` seconds."""

    seconds: float
    error: float


def offsets(begins: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> list[Offset]:
    """One for each rank.

    Args:
        begins, ends: by rank and round.
    """
    return [_offset(begins[0], ends[0], *own) for own in zip(begins, ends, strict=True)]


def _offset(
    begins_0: Sequence[float], ends_0: Sequence[float], begins: Sequence[float], ends: Sequence[float]
) -> Offset:
    low = max(begin - end for begin, end in zip(begins_0, ends, strict=True))
    high = min(end - begin for end, begin in zip(ends_0, begins, strict=True))
    # Processes of one host have one clock: where that is possible it is so.
    return Offset(0.0 if low <= 0 <= high else (low + high) / 2, max(0.0, high - low) / 2)
