"""Arrange the bars of a timeline in rows, and cut waits out of compute bars."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_zero.device.recording import COMPUTE, LANES, Span

MARK = "mark"  # the lane that marks the ends of steps
MOST_BARS = 50_000  # on one page: 15 MB, which browsers can show
SHORTEST_S = 1e-6  # shorter waits are invisible and ignored


@dataclass(frozen=True, slots=True)
class RankLanes:
    """The recorded bars of one rank, with times on rank 0's clock."""

    rank: int
    rows: dict[str, list[list[Span]]] = field(default_factory=dict)  # rows of bars that do not overlap, by lane
    ends: list[float] = field(default_factory=list)  # end of the step before the recording, then of each recorded step

    @property
    def steps(self) -> int:
        return max(1, len(self.ends) - 1)

    @property
    def seconds(self) -> float:
        """Return the seconds from the end of the step before the recording to the end of the last recorded step."""
        return self.ends[-1] - self.ends[0] if len(self.ends) > 1 else 0.0

    def stood(self) -> Counter[str]:
        """Return the seconds that compute waited inside the recorded steps, by kind of wait (``waits_for``)."""
        found: Counter[str] = Counter()
        first, last = (self.ends[0], self.ends[-1]) if self.ends else (float("-inf"), float("inf"))
        for span in (s for row in self.rows.get(COMPUTE, []) for s in row if s.waits_for):
            if (seconds := min(span.end, last) - max(span.begin, first)) > 0:
                found[span.waits_for] += seconds  # type: ignore[assignment]
        return found


def lanes_of(rank: int, spans: Iterable[Span]) -> RankLanes:
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
    """Choose the ranks to show: all if they have at most ``most`` bars in all, else as many as fit.

    Rank 0 is chosen first. Then come, in turns, the ranks whose compute waits least (others wait for them) and most.
    """

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
    """Divide ``spans``, which are sorted by begin, among as few rows as possible. In a row no two spans overlap."""
    rows: list[list[Span]] = []
    for span in spans:
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def outermost(waits: Sequence[Span]) -> list[Span]:
    """Cut nested waits out of the waits that contain them, so that each instant belongs to the innermost wait."""
    waits = sorted(waits, key=lambda s: (s.begin, -s.end))  # of waits with the same begin, the longest first
    begins = [wait.begin for wait in waits]
    found: list[Span] = []
    for number, wait in enumerate(waits):
        meanwhile = waits[number + 1 : bisect.bisect_left(begins, wait.end)]
        found += without([wait], [other for other in meanwhile if other.end <= wait.end])
    return sorted(found, key=lambda s: s.begin)


def without(bars: Iterable[Span], holes: Sequence[Span]) -> list[Span]:
    """Return ``bars`` without the times of ``holes``, which are sorted by begin."""
    found: list[Span] = []
    # Running maximum of the ends, to skip to the waits near a bar: a rank may have thousands.
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
