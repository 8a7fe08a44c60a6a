"""Estimate the clock offsets between ranks from rounds of collectives.

In each round every rank reads its clock before and after a collective. No rank can leave before the last rank has
entered, so with offset o of rank r, every round bounds o from both sides, and the tightest bounds count::

    begin[r] + o <= end[0]      begin[0] <= end[r] + o
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Offset(NamedTuple):
    """Seconds to add to a rank's clock to get rank 0's clock, accurate to ``error`` seconds."""

    seconds: float
    error: float


def offsets(begins: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> list[Offset]:
    """Estimate the offset of each rank. ``begins, ends``: seconds by rank and round."""
    return [_offset(begins[0], ends[0], *own) for own in zip(begins, ends, strict=True)]


def _offset(
    begins_0: Sequence[float], ends_0: Sequence[float], begins: Sequence[float], ends: Sequence[float]
) -> Offset:
    low = max(begin - end for begin, end in zip(begins_0, ends, strict=True))
    high = min(end - begin for end, begin in zip(ends_0, begins, strict=True))
    # Processes of one host share a clock, so 0 is preferred where it is possible.
    return Offset(0.0 if low <= 0 <= high else (low + high) / 2, max(0.0, high - low) / 2)
