"""Counts the reductions that were issued in the open pass, here and on the rank that is furthest behind."""

from __future__ import annotations


class IssuedReductions:
    """How many reductions all ranks have issued. The ranks tell each other when they agree on gathers.

    A rank may wait for a reduction that all ranks have issued: none of them needs another message to get that far, so
    the wait holds up nobody.

    Attributes:
        here: reductions that this rank has issued in this pass.
        everywhere: reductions that every rank has issued in this pass, as far as is known. They are the same ones on
            all ranks, because ranks issue reductions in one order.
    """

    def __init__(self) -> None:
        self.here = self.everywhere = 0

    def pass_begins(self) -> None:
        self.here = self.everywhere = 0

    def told(self, counts: list[int]) -> None:
        """Take the numbers ``here`` of all ranks."""
        self.everywhere = min(counts)
