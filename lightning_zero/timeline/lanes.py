"""Bars of a timeline: which lie in one row, and what of compute's is left between its waits."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_zero.device.recording import COMPUTE, LANES, Span

MARK = "mark"  # the lane of the ends of steps
MOST_BARS = 50_000  # on one page: 15 MB, which a browser still shows
SHORTEST_S = 1e-6  # a wait that is shorter is none: nobody can see it


@dataclass(frozen=True, slots=True)
class RankLanes:
    """What one rank has recorded, on the clock of rank 0.

    Attributes:
        rows: of each lane that has bars; those of one row do not overlap.
        ends: of steps: those that begin and end what was recorded are among them.
    """

    rank: int
    rows: dict[str, list[list[Span]]] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return max(1, len(self.ends) - 1)

    @property
    def seconds(self) -> float:
        """From the end of the step before to that of the last step."""
        return self.ends[-1] - self.ends[0] if len(self.ends) > 1 else 0.0

    def stood(self) -> Counter[str]:
        """Seconds that compute stood still inside these steps, by what for."""
        found: Counter[str] = Counter()
        first, last = (self.ends[0], self.ends[-1]) if self.ends else (float("-inf"), float("inf"))
        for span in (s for row in self.rows.get(COMPUTE, []) for s in row if s.waits_for):
            if (seconds := min(span.end, last) - max(span.begin, first)) > 0:
                found[span.waits_for] += seconds  # type: ignore[assignment]
        return found


def lanes_of(rank: int, spans: Iterable[Span]) -> RankLanes:
    """The lanes of a rank."""
    spans = list(spans)
    ends = sorted(span.begin for span in spans if span.lane == MARK)
    rows: dict[str, list[list[Span]]] = {}
    for lane in LANES:
        own = sorted((s for s in spans if s.lane == lane), key=lambda s: (s.begin, s.end))
        if lane == COMPUTE:
            waits = outermost([s for s in own if s.waits_for and s.end - s.begin >= SHORTEST_S])
            own = sorted(without([s for s in own if not s.waits_for], waits) + waits, key=lambda s: s.begin)
        if own:
            rows[lane] = in_rows(own)
    return RankLanes(rank, rows, ends)


def chosen(ranks: Sequence[RankLanes], most: int = MOST_BARS) -> list[RankLanes]:
    """The ranks whose lanes are looked at: all, or as many as have ``most`` bars together: rank 0, and in turns that
    whose compute stands still least, for which the others wait, and that which stands still most."""

    def bars(lanes: RankLanes) -> int:
        return sum(len(row) for rows in lanes.rows.values() for row in rows)

    by_wait = sorted(ranks[1:], key=lambda lanes: lanes.stood().total())
    in_turns = [lanes for pair in zip(by_wait, reversed(by_wait), strict=True) for lanes in pair]
    order = list(dict.fromkeys(lanes.rank for lanes in [*ranks[:1], *in_turns]))
    counts = {lanes.rank: bars(lanes) for lanes in ranks}
    sums = itertools.accumulate(counts[rank] for rank in order)
    kept = {rank for place, (rank, total) in enumerate(zip(order, sums, strict=True)) if not place or total <= most}
    return [lanes for lanes in ranks if lanes.rank in kept]


def in_rows(spans: Sequence[Span]) -> list[list[Span]]:
    """``spans``, which come in the order of their beginnings, in as few rows as they need not to overlap."""
    rows: list[list[Span]] = []
    for span in spans:
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def outermost(waits: Sequence[Span]) -> list[Span]:
    """Waits without what inner ones have: each instant is that of the innermost."""
    waits = sorted(waits, key=lambda s: (s.begin, -s.end))  # those that begin at once: the outer one first
    begins = [wait.begin for wait in waits]
    found: list[Span] = []
    for number, wait in enumerate(waits):
        meanwhile = waits[number + 1 : bisect.bisect_left(begins, wait.end)]
        found += without([wait], [other for other in meanwhile if other.end <= wait.end])
    return sorted(found, key=lambda s: s.begin)


def without(bars: Iterable[Span], holes: Sequence[Span]) -> list[Span]:
    """What is left of ``bars`` between ``holes``, which come in the order of their beginnings."""
    found: list[Span] = []
    # The last end so far: a rank may have thousands of waits, and only those near a bar are looked at.
    ends = list(itertools.accumulate((hole.end for hole in holes), max))
    begins = [hole.begin for hole in holes]
    for bar in bars:
        begin = bar.begin
        for hole in holes[bisect.bisect_right(ends, begin) : bisect.bisect_left(begins, bar.end)]:
            if hole.begin > begin:
                found.append(bar._replace(begin=begin, end=hole.begin))
            begin = max(begin, hole.end)
        if begin < bar.end:
            found.append(bar._replace(begin=begin))
    return found
