"""Draw a timeline as a PNG by matplotlib, where that is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from lightning_zero.timeline.lanes import RankLanes
from lightning_zero.timeline.page import colour_of

_COLOURS = {
    "forward": "#4c7fd6",
    "backward": "#7a5cc7",
    "recompute": "#a9bde6",
    "gather": "#2a9d8f",
    "reduce": "#b8860b",
    "h2d": "#b8578f",
    "d2h": "#8a7f66",
    "disk": "#7d8597",
    "step": "#3b9b57",
    "wait": "#d4452f",
}
RANKS_SHOWN = 8  # more would be too small


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, title: str, ranks: Sequence[RankLanes], window: tuple[float, float]) -> None:
    """Write the picture of the first ranks; for arguments see :func:`page_html`."""
    # Figures without pyplot need no window or backend and leave no state.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [
        (f"{lane}" if not number else "", lanes.rank, row, first and not number)
        for lanes in ranks[:RANKS_SHOWN]
        for first, (lane, in_lane) in zip([True] + [False] * len(lanes.rows), lanes.rows.items(), strict=False)
        for number, row in enumerate(in_lane)
    ]
    figure = Figure(figsize=(12, 1.1 + 0.2 * len(rows)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for y, (_, rank, row, first) in enumerate(rows):
        bars = [(1e3 * (span.begin - window[0]), 1e3 * (span.end - span.begin)) for span in row]
        axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=[_COLOURS[colour_of(span)] for span in row])
        if first and y:
            axes.axhline(y - 0.5, color="#98a1b3", linewidth=0.6)
        if first:
            axes.annotate(f"rank {rank}", (1.003, y), xycoords=("axes fraction", "data"), fontsize=8, va="center")
    for end in ranks[0].ends:
        axes.axvline(1e3 * (end - window[0]), color="#1c2230", linewidth=0.7, linestyle=(0, (3, 3)))
    axes.set_xlim(0, 1e3 * (window[1] - window[0]))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=8)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(labelsize=8, length=2)
    axes.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    used = {colour_of(span) for _, _, row, _ in rows for span in row}
    keys = [Patch(color=c, label="exposed" if k == "wait" else k) for k, c in _COLOURS.items() if k in used]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=8, frameon=False)
    figure.savefig(path)
