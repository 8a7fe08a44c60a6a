"""Arrange the bars of a timeline in rows, cut waits out of compute bars, and draw all as one self-contained page of
HTML: bars in SVG, in the browser's light or dark theme."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from lightning_zero.device.recording import COMPUTE, LANES, WAITS, Span

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
    """Choose the ranks to show: all ranks if they have at most ``most`` bars together, else as many ranks as fit.

    Rank 0 is chosen first, then by turns a rank whose compute waits least (others wait for it) and one that waits most.
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
    """Cut nested waits out of the waits that contain them, so that each moment belongs to the innermost wait only."""
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


ROW = 18  # pixels of a row with its gap
LOW_ROW = 11  # of a lane whose bars are all hairlines
HAIRLINE = 0.003  # share of the width
GAP = 4
NAMED = 0.012  # share of the width: shorter bars have no name, also when the page is zoomed
MOST_TICKS = 10

_STYLE = """
:root { color-scheme: light dark;
  --ground: #fff; --ink: #1c2230; --faint: #667085; --line: #d5d9e2; --lane: #f5f6f9;
  --forward: #4c7fd6; --backward: #7a5cc7; --recompute: #a9bde6; --gather: #2a9d8f; --reduce: #b8860b;
  --h2d: #b8578f; --d2h: #8a7f66; --disk: #7d8597; --step: #3b9b57; --wait: #d4452f; --on: #fff; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #14171e; --ink: #e4e7ee; --faint: #98a1b3; --line: #363c49; --lane: #1c2029;
  --forward: #5b8fe8; --backward: #9478e0; --recompute: #5a6d99; --gather: #2f9e90; --reduce: #b98d1f;
  --h2d: #cf6da6; --d2h: #8f8468; --disk: #7d8597; --step: #3f9d5b; --wait: #e25a45; --on: #fff; } }
body { margin: 0; padding: 20px 24px; background: var(--ground); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 18px; margin: 0 0 2px; } h2 { font-size: 14px; margin: 20px 0 6px; }
p { margin: 2px 0 10px; color: var(--faint); max-width: 75em; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 2px 12px 2px 0; border-bottom: 1px solid var(--line); font-weight: normal; }
th { color: var(--faint); } th:first-child, td:first-child { text-align: left; }
.keys { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin: 12px 0; align-items: center; }
.keys i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px;
  vertical-align: -1px; }
.keys label { margin-left: auto; } .keys input { width: 160px; vertical-align: middle; }
.rank { display: flex; } .names { flex: none; width: 76px; font-size: 12px; color: var(--faint); }
.names div { display: flex; align-items: center; line-height: 10px; }
.scroll { overflow-x: auto; flex: 1; min-width: 0; }
.scroll > svg { display: block; width: calc(100% * var(--zoom, 1)); }
svg text { font: 10px system-ui, sans-serif; fill: var(--on); pointer-events: none; }
svg .tick { stroke: var(--line); } svg .end { stroke: var(--ink); stroke-dasharray: 3 3; }
svg .time { fill: var(--faint); }
rect { rx: 2px; } rect:hover { opacity: 0.75; } .lane { fill: var(--lane); rx: 0; }
"""
_COLOURS = ("forward", "backward", "recompute", "gather", "reduce", "h2d", "d2h", "disk", "step", "wait")
_SCRIPT = """
const names = [...document.querySelectorAll('svg svg')];
function fit() {  // a name that its bar is too short for is not shown
  const shown = names.map(s => s.firstChild.getComputedTextLength() + 5 < s.width.baseVal.value);
  names.forEach((s, i) => { s.firstChild.style.visibility = shown[i] ? 'visible' : 'hidden'; }); }
fit(); window.onresize = fit;
const all = [...document.querySelectorAll('.scroll')], zoom = document.getElementById('zoom');
zoom.oninput = () => { const at = all.map(s => (s.scrollLeft + s.clientWidth / 2) / s.scrollWidth);
  document.documentElement.style.setProperty('--zoom', zoom.value);
  all.forEach((s, i) => { s.scrollLeft = at[i] * s.scrollWidth - s.clientWidth / 2; }); fit(); };
all.forEach(s => { s.onscroll = () => all.forEach(o => {
  if (o.scrollLeft !== s.scrollLeft) o.scrollLeft = s.scrollLeft; }); });
"""


def page_html(
    title: str, note: str, ranks: Sequence[RankLanes], shown: Sequence[RankLanes], window: tuple[float, float]
) -> str:
    """Return the HTML page: a table of all ``ranks``, and bars of the ranks ``shown``.

    ``note``: a sentence below the title. ``window``: times in seconds at the left and the right end of the bars.
    """
    used = {colour_of(span) for lanes in shown for rows in lanes.rows.values() for row in rows for span in row}
    keys = "".join(
        f'<span><i style="background:var(--{c})"></i>{"exposed: computation waits" if c == "wait" else c}</span>'
        for c in _COLOURS
        if c in used
    )
    keys += '<span><i style="background:var(--lane)"></i>no bar: code outside of units</span>'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>{escape(note)}</p>{_table(ranks)}"
        f'<div class="keys">{keys}<label>zoom <input id="zoom" type="range" min="1" max="40" step="0.5" value="1">'
        "</label></div>"
        + "".join(_rank(lanes, window, number == 0) for number, lanes in enumerate(shown))
        + f"<script>{_SCRIPT}</script></body></html>\n"
    )


def colour_of(span: Span) -> str:
    if span.waits_for:
        return "wait"
    if span.lane == "compute":
        kind = span.what.rsplit(" ", 1)[-1]
        return kind if kind in _COLOURS else "forward"
    return span.lane


def _table(ranks: Sequence[RankLanes]) -> str:
    kinds = [kind for kind in WAITS if any(lanes.stood()[kind] for lanes in ranks)]
    head = "".join(f"<th>{escape(kind)}</th>" for kind in kinds)
    rows = []
    for lanes in ranks:
        stood, steps = lanes.stood(), lanes.steps
        share = 100 * sum(stood.values()) / lanes.seconds if lanes.seconds else 0.0
        cells = "".join(f"<td>{1e3 * stood[kind] / steps:.2f}</td>" for kind in kinds)
        step = f"<td>{1e3 * lanes.seconds / steps:.2f}</td><td>{share:.0f} %</td>"
        rows.append(f"<tr><td>rank {lanes.rank}</td>{step}{cells}</tr>")
    return f"<table><tr><th></th><th>ms per step</th><th>exposed</th>{head}</tr>{''.join(rows)}</table>"


def _rank(lanes: RankLanes, window: tuple[float, float], with_times: bool) -> str:
    y = top = ROW if with_times else 0
    names, bars = [], []
    for lane, rows in lanes.rows.items():
        longest = max(span.end - span.begin for row in rows for span in row)
        row_height = LOW_ROW if longest < HAIRLINE * (window[1] - window[0]) else ROW
        names.append(f'<div style="height:{row_height * len(rows)}px">{lane}</div>')
        bars.append(f'<rect class="lane" x="0" y="{y}" width="100%" height="{row_height * len(rows) - GAP}"/>')
        for row in rows:
            bars += [_bar(span, y, row_height - GAP, window) for span in row]
            y += row_height
    ticks = _ticks(window, y, with_times)
    ends = "".join(
        f'<line class="end" x1="{x:.4f}%" x2="{x:.4f}%" y1="{top}" y2="{y}"><title>end of a step</title></line>'
        for x in (_place(end, window) for end in lanes.ends)
        if 0 <= x <= 100
    )
    return (
        f'<h2>rank {lanes.rank}</h2><div class="rank"><div class="names" style="padding-top:{top}px">{"".join(names)}'
        f'</div><div class="scroll"><svg height="{y}">{ticks}{"".join(bars)}{ends}</svg></div></div>'
    )


def _place(moment: float, window: tuple[float, float]) -> float:
    return 100 * (moment - window[0]) / (window[1] - window[0])


def _bar(span: Span, y: int, height: int, window: tuple[float, float]) -> str:
    left, right = max(0.0, _place(span.begin, window)), min(100.0, _place(span.end, window))
    if right <= left:
        return ""
    what = f"waits for {span.waits_for}: {span.what}" if span.waits_for else span.what
    title = f"{escape(what)}, {1e3 * (span.end - span.begin):.3f} ms from {1e3 * (span.begin - window[0]):.3f} ms"
    place = f'x="{left:.4f}%" y="{y}" width="{right - left:.4f}%" height="{height}"'
    rect = f'<rect {place} style="fill:var(--{colour_of(span)})"><title>{title}</title></rect>'
    if right - left < 100 * NAMED:
        return rect
    # The name of a unit without the modules around it: layers.1 for model.model.layers.1.
    name = span.waits_for or re.sub(r"(?:\w+\.)+(?=\w+\.\w)", "", span.what)
    return f'{rect}<svg {place}><text x="3" y="10.5">{escape(name)}</text></svg>'


def _ticks(window: tuple[float, float], height: int, with_times: bool) -> str:
    """Return a time axis as SVG: a tick at the left end, then at most ``MOST_TICKS`` more at round intervals."""
    milliseconds = 1e3 * (window[1] - window[0])
    power = 10 ** math.floor(math.log10(milliseconds / MOST_TICKS))
    distance = next(n * power for n in (1, 2, 5, 10, 20) if milliseconds / (n * power) <= MOST_TICKS)
    found = []
    for number in range(int(milliseconds / distance) + 1):
        x = 100 * number * distance / milliseconds
        found.append(f'<line class="tick" x1="{x:.4f}%" x2="{x:.4f}%" y1="0" y2="{height}"/>')
        if with_times and x < 98:
            found.append(f'<text class="time" x="{x:.4f}%" dx="3" y="11">{number * distance:.6g} ms</text>')
    return "".join(found)
