"""Which bytes of a growing file are taken. Arithmetic on integers."""

from __future__ import annotations

from collections.abc import Callable


class Regions:
    """Regions of a file. Freed regions are reused before the file grows.

    Attributes:
        end: of the last region.
        holes: ``(low, high)`` of freed bytes before ``end``, in order, never adjacent.
    """

    def __init__(self) -> None:
        self.end = 0
        self.holes: list[tuple[int, int]] = []

    def take(self, nbytes: int, ensure: Callable[[int], None]) -> int:
        """Return the offset of a new region: the first hole that is large enough, or the end. ``ensure`` is called with
        the bytes that the file must hold; if it raises, nothing changes."""
        for i, (low, high) in enumerate(self.holes):
            if high - low >= nbytes:
                self.holes[i : i + 1] = [(low + nbytes, high)] if high - low > nbytes else []
                return low
        ensure(self.end + nbytes)
        self.end += nbytes
        return self.end - nbytes

    def give_back(self, low: int, high: int) -> None:
        """Free bytes ``[low, high)``."""
        holes: list[tuple[int, int]] = []
        for hole in sorted([*self.holes, (low, high)]):
            if holes and holes[-1][1] == hole[0]:
                holes[-1] = holes[-1][0], hole[1]
            elif hole[0] < hole[1]:
                holes.append(hole)
        if holes and holes[-1][1] == self.end:
            self.end = holes.pop()[0]
        self.holes = holes
