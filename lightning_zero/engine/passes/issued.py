"""How far the reductions of the open pass have got, here and on the rank that is furthest behind."""

from __future__ import annotations


class IssuedReductions:
    """Ranks tell each other when they agree on gathers. What all have issued may be waited for: nothing that a rank
    still needs to get there can be held up.

    Attributes:
        here: reductions that this rank has issued in this pass.
        everywhere: reductions that every rank has issued in it, as far as is known. Of those, all ranks have issued the
            same, since they issue them in one order.
    """

    def __init__(self) -> None:
        self.here = self.everywhere = 0

    def pass_begins(self) -> None:
        self.here = self.everywhere = 0

    def told(self, counts: list[int]) -> None:
        """``here`` of all ranks."""
        self.everywhere = min(counts)
