"""The order of gathers: recorded once, compiled to a plan, followed and looked ahead in.

A *pass* is one forward with its backward (or one evaluation step). While a pass is recorded, every gather is written
down in the order in which it was agreed; :func:`compile_plan` turns that history into a :class:`Plan`, and a
:class:`Cursor` follows the plan in later passes: it says which gathers must be issued before the one that is
demanded, what may be gathered ahead under the byte budget, and what stays gathered after a use.

Units are integers here. All ranks hold the same history, so all compile the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_PLAN = 65536  # entries; a longer history without a period is cut (the rest is agreed step by step)


class Entry(NamedTuple):
    """One gather. ``uses`` counts the uses it serves: above one the unit stays gathered between them."""

    unit: int
    uses: int = 1


class Plan(NamedTuple):
    """
    Attributes:
        cyclic: the pass may repeat the entries any number of times (generation).
        one_path: all ranks asked for the same units, one after the other, in the pass that was recorded.
    """

    entries: tuple[Entry, ...]
    cyclic: bool = False
    one_path: bool = False


def may_come_ahead(nbytes: int, waiting: Sequence[int], prefetch_bytes: int) -> bool:
    """Whether a unit of ``nbytes`` may be gathered ahead, beside those that wait: one of any size, more by budget."""
    return prefetch_bytes > 0 and (not waiting or sum(waiting) + nbytes <= prefetch_bytes)


def find_period(history: Sequence[int]) -> int:
    """Length of the shortest prefix whose whole repetitions make up ``history`` (its own length if there is none)."""
    n = len(history)
    # Prefix function of Knuth, Morris and Pratt: n - border[n] is the shortest period.
    border = [0] * (n + 1)
    k = 0
    for i in range(1, n):
        while k and history[i] != history[k]:
            k = border[k]
        if history[i] == history[k]:
            k += 1
        border[i + 1] = k
    period = n - border[n]
    return period if period and n % period == 0 else n


def compile_plan(history: Sequence[int], nbytes: Sequence[int], keep_bytes: int = 0, *, cyclic: bool = False) -> Plan:
    """The plan of a pass from the gathers that were seen in it.

    Args:
        history: units in the order of their gathers, repetitions included.
        nbytes: gathered bytes of each unit.
        keep_bytes: budget for units that stay gathered until their next use. Gaps between two uses are closed from
            the shortest on, so the last units of a forward come first. A unit used twice in a row always stays.
        cyclic: the pass has no backward, and may repeat its gathers.
    """
    history = list(history[:MAX_PLAN])
    if cyclic:
        return Plan(tuple(Entry(unit) for unit in history[: find_period(history)]), cyclic=True)
    uses = [1] * len(history)
    for i, j in sorted(_gaps_to_close(history, nbytes, keep_bytes), reverse=True):
        uses[i] += uses[j]  # from the back, so that a chain of closed gaps adds up in its first entry
        uses[j] = 0
    entries = tuple(Entry(unit, n) for unit, n in zip(history, uses, strict=True) if n)
    return Plan(entries)


def _gaps_to_close(history: Sequence[int], nbytes: Sequence[int], budget: int) -> Iterator[tuple[int, int]]:
    """Pairs of places of one unit between which it stays gathered."""
    previous: dict[int, int] = {}
    gaps: list[tuple[int, int, int]] = []
    for place, unit in enumerate(history):
        if unit in previous:
            gaps.append((place - previous[unit], previous[unit], place))
        previous[unit] = place
    for length, i, j in sorted(gaps):
        size = 0 if length == 1 else nbytes[history[i]]
        if size <= budget:
            budget -= size
            yield i, j


@dataclass(slots=True)
class Cursor:
    """A place in a plan. ``position`` counts the entries issued in this pass."""

    plan: Plan
    position: int = 0
    uses_left: dict[int, int] = field(default_factory=dict)  # unit -> uses that its last gather still serves

    def _wrap(self) -> None:
        if self.plan.cyclic and self.plan.entries and self.position == len(self.plan.entries):
            self.position = 0

    def up_to(self, unit: int) -> list[int] | None:
        """The units to issue, in order, so that ``unit`` comes last; None if the plan does not hold it any more."""
        self._wrap()
        entries = self.plan.entries
        for i in range(self.position, len(entries)):
            if entries[i].unit == unit:
                return [self._take() for _ in range(i + 1 - self.position)]
        if self.plan.cyclic and any(e.unit == unit for e in entries[: self.position]):
            head = [self._take() for _ in range(len(entries) - self.position)]
            return head + (self.up_to(unit) or [])
        return None

    def peek(self) -> int | None:
        """The unit that follows."""
        return self.plan.entries[self.position].unit if self.position < len(self.plan.entries) else None

    def ahead(self, admit: Callable[[int], bool]) -> list[int]:
        """The following units that ``admit`` accepts one by one; it stops at the first that it does not."""
        taken: list[int] = []
        while self.position < len(self.plan.entries) and admit(self.plan.entries[self.position].unit):
            taken.append(self._take())
        return taken

    def rest(self) -> list[int]:
        """The units still to be issued, so that ranks that need them are served."""
        return [self._take() for _ in range(len(self.plan.entries) - self.position)]

    def used(self, unit: int) -> bool:
        """Count a use of ``unit`` as over; whether it may be dropped now."""
        left = self.uses_left.get(unit, 1) - 1
        self.uses_left[unit] = left
        return left <= 0

    def _take(self) -> int:
        entry = self.plan.entries[self.position]
        self.position += 1
        self.uses_left[entry.unit] = entry.uses
        return entry.unit
