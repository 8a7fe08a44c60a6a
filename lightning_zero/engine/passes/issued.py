"""Counts the reductions that were issued in the open pass: here, and on the rank that is furthest behind.

A rank that waits for a reduction may hold up the gathers that another rank needs before it can issue that reduction.
So it waits only for reductions that all ranks have issued, or will issue without further gathers of this rank. While
ranks agree on gathers, they tell each other how many reductions they have issued. When a later pass of the same kind
follows the plan, each rank is taken to have issued as many after as many gathers.
"""

from __future__ import annotations

from collections.abc import Sequence


class IssuedReductions:
    """The numbers of reductions that were issued in the open pass.

    Attributes:
        here: reductions that this rank has issued in this pass.
        everywhere: reductions that all ranks have issued in this pass, as they told: the first so many of their order.
        expected: reductions that all ranks will issue without further gathers of this one, if they do as in the pass
            that was learned from.
    """

    def __init__(self) -> None:
        self.here = self.everywhere = self.expected = 0
        self._met: list[tuple[int, int]] = []  # gathers issued, reductions issued by all, at each agreement
        self._known: Sequence[int] = ()

    def pass_begins(self, known: Sequence[int] = ()) -> None:
        """Begin to count anew.

        Args:
            known: from :meth:`learned`, where this kind of pass has a plan.
        """
        self.here = self.everywhere = self.expected = 0
        self._met, self._known = [], known

    def told(self, gathers: int, counts: Sequence[int]) -> None:
        """Note that all ranks have issued the same ``gathers`` by now, and these ``counts`` of reductions."""
        self.everywhere = min(counts)
        self._met.append((gathers, self.everywhere))

    def gathered(self, gathers: int) -> None:
        """Take the number of gathers of the plan that this rank has issued."""
        if gathers < len(self._known):
            self.expected = self._known[gathers]

    def disappointed(self) -> None:
        """Some rank does not do as before: nothing is expected any more in this pass."""
        self._known, self.expected = (), 0

    def learned(self, places: Sequence[int]) -> list[int]:
        """For each number of gathers of the plan, the reductions that all ranks had issued by then in this pass.

        Args:
            places: for each gather of the pass, and for its end, how many gathers of the plan come before it.
        """
        known = [0] * (places[-1] + 1)
        for gathers, reductions in self._met:
            if gathers < len(places):  # a plan has an end, and what comes after it is agreed again
                known[places[gathers]] = max(known[places[gathers]], reductions)
        for place in range(1, len(known)):
            known[place] = max(known[place], known[place - 1])
        return known
