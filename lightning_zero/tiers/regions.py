"""Which bytes of a file that grows are taken. Arithmetic on integers."""

from __future__ import annotations

from collections.abc import Callable


class Regions:
    """Regions that are taken and given back; those given back are taken again before the file grows.

    Attributes:
        end: of the last region.
        holes: ``(low, high)`` of what was given back before that, in order, none next to another.
    """

    def __init__(self) -> None:
        self.end = 0
        self.holes: list[tuple[int, int]] = []

    def take(self, nbytes: int, ensure: Callable[[int], None]) -> int:
        """The offset of a region of ``nbytes``: in the first hole that is large enough, or at the end.

        Args:
            ensure: called where the file must hold so many bytes; what it raises leaves everything as it was.
        """
        for i, (low, high) in enumerate(self.holes):
            if high - low >= nbytes:
                self.holes[i : i + 1] = [(low + nbytes, high)] if high - low > nbytes else []
                return low
        ensure(self.end + nbytes)
        self.end += nbytes
        return self.end - nbytes

    def give_back(self, low: int, high: int) -> None:
        """Bytes ``[low, high)`` of a region are free."""
        holes: list[tuple[int, int]] = []
        for hole in sorted([*self.holes, (low, high)]):
            if holes and holes[-1][1] == hole[0]:
                holes[-1] = holes[-1][0], hole[1]
            elif hole[0] < hole[1]:
                holes.append(hole)
        if holes and holes[-1][1] == self.end:
            self.end = holes.pop()[0]
        self.holes = holes
