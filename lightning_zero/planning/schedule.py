"""Record the order of gathers once, compile it to a plan, and follow the plan in later passes.

All ranks record the same history of units (integers), so all compile the same :class:`Plan`. A :class:`Cursor` then
says which gathers to issue before a demanded one, what to prefetch within a byte budget, and what stays gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_PLAN = 65536  # entries; longer histories are cut, and ranks then agree on each further gather


class Entry(NamedTuple):
    """One gather of ``unit``. The unit then stays gathered until it has been used ``uses`` times."""

    unit: int
    uses: int = 1


class Plan(NamedTuple):
    """The gathers of a pass, such as a training step, in order."""

    entries: tuple[Entry, ...]
    cyclic: bool = False  # the pass may repeat the entries any number of times (generation)
    one_path: bool = False  # all ranks demanded the same units in the same order while the pass was recorded


def may_come_ahead(nbytes: int, waiting: Sequence[int], prefetch_bytes: int) -> bool:
    """Return whether a unit of ``nbytes`` can be prefetched within ``prefetch_bytes``. ``waiting``: bytes of each unit
    that was prefetched and not used yet. If none waits, any size can be prefetched, unless ``prefetch_bytes`` is 0."""
    return prefetch_bytes > 0 and (not waiting or sum(waiting) + nbytes <= prefetch_bytes)


def find_period(history: Sequence[int]) -> int:
    """Return the length of the shortest prefix whose repetitions make up ``history``."""
    n = len(history)
    # Knuth-Morris-Pratt prefix function: n - border[n] is the shortest period.
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
    """Compile the plan of a pass from its recorded gathers.

    Args:
        history: units in the order of their gathers, with repetitions.
        nbytes: gathered bytes of each unit.
        keep_bytes: budget for units that stay gathered until their next use. Units whose next use comes soonest are
            kept first, so the last units of a forward stay. A unit used twice in a row always stays.
        cyclic: the pass has no backward and may repeat its gathers.
    """
    history = list(history[:MAX_PLAN])
    if cyclic:
        return Plan(tuple(Entry(unit) for unit in history[: find_period(history)]), cyclic=True)
    uses = [1] * len(history)
    for i, j in sorted(_gaps_to_close(history, nbytes, keep_bytes), reverse=True):
        uses[i] += uses[j]  # backwards, so that a chain of closed gaps adds up in its first entry
        uses[j] = 0
    entries = tuple(Entry(unit, n) for unit, n in zip(history, uses, strict=True) if n)
    return Plan(entries)


def _gaps_to_close(history: Sequence[int], nbytes: Sequence[int], budget: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of positions in ``history``: successive uses of a unit that stays gathered between them."""
    previous: dict[int, int] = {}
    gaps: list[tuple[int, int, int]] = []
    for place, unit in enumerate(history):
        if unit in previous and unit >= 0:  # negative: no gather, but a place to which all ranks come
            gaps.append((place - previous[unit], previous[unit], place))
        previous[unit] = place
    for length, i, j in sorted(gaps):
        size = 0 if length == 1 else nbytes[history[i]]
        if size <= budget:
            budget -= size
            yield i, j


@dataclass(slots=True)
class Cursor:
    """A position in a plan: how many of its gathers have been issued in this pass."""

    plan: Plan
    position: int = 0
    taken: int = 0  # number of gathers issued so far, in all rounds of a cyclic plan
    uses_left: dict[int, int] = field(default_factory=dict)  # unit -> remaining uses of its last gather

    def up_to(self, unit: int) -> list[int] | None:
        """Return the units to gather next, up to and including ``unit``, and advance past them. Return None, and do not
        advance, if the rest of the plan does not have ``unit``. A cyclic plan continues at its beginning."""
        entries = self.plan.entries
        if self.plan.cyclic and self.position == len(entries):
            self.position = 0
        for i in range(self.position, len(entries)):
            if entries[i].unit == unit:
                return [self._take() for _ in range(i + 1 - self.position)]
        if self.plan.cyclic and any(e.unit == unit for e in entries[: self.position]):
            head = [self._take() for _ in range(len(entries) - self.position)]
            return head + (self.up_to(unit) or [])
        return None

    def peek(self) -> int | None:
        return self.plan.entries[self.position].unit if self.position < len(self.plan.entries) else None

    def ahead(self, admit: Callable[[int], bool]) -> list[int]:
        """Return the next units to prefetch, up to the first one that ``admit`` refuses, and advance past them."""
        taken: list[int] = []
        while self.position < len(self.plan.entries) and admit(self.plan.entries[self.position].unit):
            taken.append(self._take())
        return taken

    def rest(self) -> list[int]:
        """Return all remaining units, which the caller must gather for other ranks, and advance to the end."""
        return [self._take() for _ in range(len(self.plan.entries) - self.position)]

    def up_to_number(self, taken: int) -> list[int]:
        """Return the units to gather until ``taken`` gathers of this pass have been issued, and advance past them."""
        units: list[int] = []
        while self.taken < taken:
            self.position %= len(self.plan.entries)
            units.append(self._take())
        return units

    def used(self, unit: int) -> bool:
        """Count one use of ``unit`` as finished. Return whether the plan allows the unit to be dropped now."""
        left = self.uses_left.get(unit, 1) - 1
        self.uses_left[unit] = left
        return left <= 0

    def _take(self) -> int:
        entry = self.plan.entries[self.position]
        self.position, self.taken = self.position + 1, self.taken + 1
        self.uses_left[entry.unit] = entry.uses
        return entry.unit
