"""Draw the results of a run, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

from lightning_zero.planning.choose import human_bytes
from lightning_zero.report.page import SPEEDS, human_seconds

# These can be told apart on white and on black, also with a colour vision deficiency.
COLOURS = ("#4c7fd6", "#d9822b", "#2a9d8f", "#c75b9b", "#8a7f66", "#9478e0")
INK = "#1c2230"  # becomes the text colour of the page
STYLE: dict[Any, Any] = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "report", "legend.frameon": False}
STYLE |= {"axes.titlelocation": "left", "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.15, "axes.edgecolor": INK, "figure.dpi": 120}
STYLE |= {f"{what}color": INK for what in ("text.", "xtick.", "ytick.", "grid.", "axes.label", "axes.title")}
STYLE |= {"figure.constrained_layout.wspace": 0.04, "figure.constrained_layout.hspace": 0.06}

# What callbacks log: ours, and Lightning's LearningRateMonitor, DeviceStatsMonitor and ThroughputMonitor.
OF_CALLBACKS = re.compile(
    r"(zero|run)/|lr|DeviceStatsMonitor|(train|validate)/((device/)?(\w+_per_sec|mfu)|time|batches|samples|lengths)$"
)
# Lines of two runs: the first is broad and pale, so that the second one can be seen on it where they are equal.
WIDTHS: tuple[dict[str, Any], ...] = ({"linewidth": 4, "alpha": 0.6}, {"linewidth": 1.2, "zorder": 3})

UNKNOWN = "not measured (needs callbacks.monitor)"

Values = Mapping[str, Sequence[tuple[int, float]]]  # for each metric pairs (step, value)
Bars = tuple[str, Sequence[str], Mapping[str, Sequence[Any]], Callable[[float], str]]  # as _bars takes them


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw_run(path: Path, series: Values, results: Mapping[str, Any]) -> str:
    """Write a run's picture to ``path`` as PNG, and return it as SVG for the page."""
    import matplotlib
    from matplotlib.figure import Figure

    finite = _finite(series)
    held, ranks, steps_per_s = results["bytes"][:-1], len(results["ranks"]), results.get("steps_per_s")
    peak = results["bytes"][-1]["most"]
    waits, longest = results["wait_s_per_step"], results["most_wait_s_per_step"]
    of_all = f"over {ranks} ranks" if ranks > 1 else "of rank 0"
    with matplotlib.rc_context(STYLE):
        figure = Figure((11.0, 9.6), layout="constrained")
        areas = figure.subplot_mosaic([["loss", "rate"], ["memory", "speed"], ["memory", "waits"]])
        loss, rate, fast, memory, stood = (areas[name] for name in ("loss", "rate", "speed", "memory", "waits"))
        _curves(loss, "training and validation", "nothing was logged", *_by_unit(own_metrics(finite)))
        norm = {name: pairs for name, pairs in finite.items() if name == "zero/grad_norm"}
        rates = {name: pairs for name, pairs in finite.items() if name.startswith("run/lr")}
        _curves(rate, "learning rate and gradient norm", "no step was logged", rates, norm)
        speed = next((f"zero/{name}" for name in SPEEDS if f"zero/{name}" in finite), "")
        speeds = ({n: finite[n] for n in finite.keys() & {name}} for name in (speed, "zero/mfu"))
        _curves(fast, "speed", UNKNOWN, *speeds)
        names = [fill(f"{row['role']}, {row['tier']}", 28) for row in held]
        keys = {"planned": "planned", "measured, rank 0": "measured", f"maximum {of_all}": "most"}
        sets = {label: [row[key] for row in held] for label, key in [*keys.items()][: 3 if ranks > 1 else 2]}
        whole = f" (whole process at its peak: {human_bytes(peak)})" if peak else ""
        _bars(memory, f"memory of a rank{whole}", names, sets, human_bytes)
        share = f" ({100 * sum(waits.values()) * steps_per_s:.0f} %)" if steps_per_s else ""
        title = f"computation waits {human_seconds(sum(waits.values()))} per step{share}" if waits else "waits"
        both = {f"mean {of_all}": [*waits.values()]} | ({f"maximum {of_all}": [*longest.values()]} if ranks > 1 else {})
        _bars(stood, title, list(waits), both, human_seconds)
        figure.savefig(path, format="png")
        return _svg(figure)


def draw_runs(runs: Mapping[str, Values], bars: Sequence[Bars]) -> str:
    """Return a picture of two runs as SVG: first curves, with one area for each kind of metric, then ``bars``."""
    import matplotlib
    from matplotlib.figure import Figure

    runs = {run: _finite(series) for run, series in runs.items()}
    units = _by_unit({name: pairs for series in runs.values() for name, pairs in own_metrics(series).items()})
    speed = next((name for name in SPEEDS if any(f"zero/{name}" in series for series in runs.values())), "")
    curves = [sorted(unit) for unit in (*units, [f"zero/{speed}"] if speed else []) if unit]
    rows = -(-(len(curves) + len(bars)) // 2)
    with matplotlib.rc_context(STYLE):
        figure = Figure((11.0, 3.2 * rows), layout="constrained")
        areas = iter(figure.subplots(rows, 2, squeeze=False).flat)
        for names, axes in zip(curves, areas, strict=False):
            lines = {
                f"{run}: {name.removeprefix('zero/')}": (
                    series[name],
                    {"color": COLOURS[4 - 4 * number], "linestyle": line} | WIDTHS[number],
                )
                for number, (run, series) in enumerate(runs.items())
                for name, line in zip(names, ("-", "--", ":"), strict=False)
                if name in series
            }
            title = shorten(", ".join(names).removeprefix("zero/"), 60, placeholder=" ...")
            styles = {name: style for name, (_, style) in lines.items()}
            _curves(axes, title, "", {name: pairs for name, (pairs, _) in lines.items()}, {}, styles)
        for bar, axes in zip(bars, areas, strict=False):
            _bars(axes, *bar)
        for axes in areas:
            axes.set_axis_off()
        return _svg(figure)


def own_metrics(series: Values) -> Values:
    """Return the metrics that a user's module logged."""
    return {name: pairs for name, pairs in series.items() if not OF_CALLBACKS.match(name)}


def _finite(series: Values) -> Values:
    return {name: [(step, v) for step, v in pairs if math.isfinite(v)] for name, pairs in series.items()}


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Type")))
    return "<svg" + text.getvalue().partition("<svg")[2].replace(INK, "currentColor")


def _by_unit(own: Values) -> tuple[Values, Values]:
    """Return the metrics in ``own`` to draw on the first y-axis, and those to draw on the second.

    Metrics whose names differ only in ``train``, ``val`` or ``test`` form a group. Each axis shows at most one group,
    losses first; other metrics are left out. Without groups, losses are on the first axis, all others on the second."""
    kinds: dict[str, dict[str, Any]] = {}
    for name, pairs in own.items():
        kinds.setdefault(re.sub(r"(train|valid(ation)?|val|test)[_/]?|_(step|epoch)$", "", name), {})[name] = pairs
    paired = sorted((kind for kind in kinds if len(kinds[kind]) > 1), key=lambda kind: "loss" not in kind)
    if paired:
        return kinds[paired[0]], kinds[paired[1]] if paired[1:] else {}
    losses = {name: pairs for name, pairs in own.items() if "loss" in name}
    return losses, {name: pairs for name, pairs in own.items() if name not in losses}


def _curves(axes: Any, title: str, without: str, left: Values, right: Values, styles: Any = None) -> None:
    """Draw curves of metrics: ``left`` on the first y-axis, ``right`` on the second, or on the first without ``left``.

    ``without``: text for the title if there are no curves. ``styles``: styles by curve name; default: colours."""
    lines, colours = [], iter(COLOURS)
    for number, values in enumerate(values for values in (left, right) if values):
        own = axes.twinx() if number else axes
        for (name, pairs), colour in zip(sorted(values.items()), colours, strict=False):
            style = {"color": colour, "marker": "o" if len(pairs) < 50 else "", "markersize": 3}
            lines += own.plot(*zip(*pairs, strict=True), label=name, **style | (styles or {}).get(name, {}))
        if len(values) == 1:
            own.set_ylabel(*(name.removeprefix("run/") for name in values), color=colour)
        own.grid(not number)
        own.spines["right"].set_visible(bool(number))
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title if lines else f"{title}: {without}")
    if max(len(left), len(right)) > 1:
        axes.legend(handles=lines)


def _bars(
    axes: Any, title: str, names: Sequence[str], sets: Mapping[str, Sequence[Any]], text: Callable[[float], str]
) -> None:
    """Draw horizontal bars from the top down: a group of adjacent bars for each name, with one bar from each of
    ``sets``. ``text`` formats the values."""
    height = 0.8 / len(sets)
    for number, (label, values) in enumerate(sets.items()):
        places = [place + (number + 0.5) * height - 0.4 for place in range(len(names))]
        drawn = axes.barh(places, [v or 0 for v in values], 0.95 * height, color=COLOURS[4 - 4 * number], label=label)
        axes.bar_label(drawn, ["not measured" if v is None else text(v) for v in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks([])
    axes.grid(False)
    axes.margins(x=0.15)
    axes.yaxis.set_inverted(True)
    axes.set_title(title if names else f"{title}: {UNKNOWN}")
    if len(sets) > 1:
        axes.legend()
