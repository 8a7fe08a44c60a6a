"""The memory plan as a picture: a bar for each row, stacked by roles, against the memory that there is."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_zero.app.plan_model import Described
from lightning_zero.app.plan_tables import TIER_NAMES, is_chosen, short_bytes, title_of
from lightning_zero.config import ConfigError, ZeroConfig
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.choose import Choice
from lightning_zero.planning.fit import Machine, Row
from lightning_zero.planning.memory import on_tier
from lightning_zero.planning.placement import Tier

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
# The palette of Okabe and Ito, which most people with a colour vision deficiency tell apart.
COLOURS = {
    Role.compute_param: "#0072b2",
    Role.master_param: "#56b4e9",
    Role.optim_state: "#009e73",
    Role.grad: "#e69f00",
    Role.gathered: "#cc79a7",
    Role.reducing: "#d55e00",
    Role.staging: "#999999",
    Role.activation: "#f0e442",
    Role.whole_copy: "#882255",  # of another palette: black is the ground of one theme
}
LABELS = {
    Role.compute_param: "parameters",
    Role.master_param: "master weights",
    Role.optim_state: "optimizer state",
    Role.grad: "gradients",
    Role.gathered: "gathered",
    Role.reducing: "being reduced",
    Role.staging: "between tiers",
    Role.activation: "activations, batch",
    Role.whole_copy: "whole, after a run",
}
THEMES = {False: ("#ffffff", "#1a1a1a", "#d9d9d9"), True: ("#16181d", "#e8e8e8", "#3a3d44")}  # ground, ink, grid
DPI = 120
WIDTH_IN = 11.0  # 1320 pixels: a laptop's screen
LINE = {False: "#b00020", True: "#ff6b6b"}


class _Panel(NamedTuple):
    """One tier: what it is called, its bytes, and the share of a row."""

    name: str
    capacity: int
    bytes_of: Callable[[Row], dict[Role, int]]


def check_picture(path: str) -> None:
    """
    Raises:
        ConfigError: matplotlib is not there, the suffix is of another format, or the folder does not exist.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"picture: expected matplotlib, which is not installed, got picture={path}. Install it "
            "(pip install 'lightning-zero[plot]'), or drop picture."
        )
    suffix = Path(path).suffix
    if suffix and suffix not in SUFFIXES:
        raise ConfigError(f"picture: expected a name that ends in {' or '.join(SUFFIXES)}, or without, got {path!r}.")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigError(f"picture: expected a folder that exists, got {folder!r}. Change picture.")


def files_of(path: str) -> list[str]:
    """The files that are written for ``picture=path``: without a suffix, one of each format."""
    return [path] if Path(path).suffix else [path + suffix for suffix in SUFFIXES]


def draw(
    path: str,
    described: Described,
    machine: Machine,
    rows: Sequence[Row],
    config: ZeroConfig,
    choice: Choice | str,
    *,
    dark: bool,
) -> None:
    """Write the picture, over files of the same names."""
    import matplotlib
    from matplotlib.figure import Figure

    ground, ink, grid = THEMES[dark]
    shown = panels(machine, rows)
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "plan", "text.color": ink}):
        figure = Figure(figsize=(WIDTH_IN, 2.2 + 0.27 * len(rows)), facecolor=ground, layout="constrained")
        axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for place, (ax, panel) in enumerate(zip(axes, shown, strict=True)):
            _style(ax, ground, ink, grid)
            _bars(ax, panel, rows, ground, ink, LINE[dark])
            if not place:
                _names(ax, rows, config, choice, ink)
        used = [role for role in COLOURS if any(panel.bytes_of(row).get(role) for panel in shown for row in rows)]
        handles = [matplotlib.patches.Patch(color=COLOURS[role], label=LABELS[role]) for role in used]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(4, len(used)),
            frameon=False,
            labelcolor=ink,
        )
        figure.suptitle(title_of(described.model, machine, described.precision), color=ink, fontsize=10)
        for file in files_of(path):
            aside = f"{file}.part"
            metadata = {"Date": None} if file.endswith(".svg") else {}
            figure.savefig(aside, format=Path(file).suffix[1:], dpi=DPI, facecolor=ground, metadata=metadata)
            os.replace(aside, file)


def panels(machine: Machine, rows: Sequence[Row]) -> list[_Panel]:
    """The tiers that any row uses."""

    def worst(row: Row, *tiers: Tier) -> dict[Role, int]:
        """By roles, at the moment at which the tiers hold the most."""
        if not row.peaks:
            return {}
        most = max(row.moments, key=lambda held: sum(on_tier(held, tier) for tier in tiers))
        return {role: nbytes for role in Role if (nbytes := sum(most[role, tier] for tier in tiers))}

    def per_host(row: Row, *tiers: Tier) -> dict[Role, int]:
        return {role: nbytes * machine.gpus for role, nbytes in worst(row, *tiers).items()}

    def together(row: Row) -> dict[Role, int]:
        return per_host(row, Tier.device, Tier.host)

    if machine.shared:
        found = [_Panel(f"host memory, of {machine.gpus} process(es)", machine.host_memory, together)]
    else:
        found = [
            _Panel("each GPU", machine.gpu_memory, lambda row: worst(row, Tier.device)),
            _Panel(f"host memory, of {machine.gpus} GPU(s)", machine.host_memory, lambda row: per_host(row, Tier.host)),
        ]
    found.append(_Panel("disk of a host", machine.nvme, lambda row: per_host(row, Tier.nvme)))
    return [found[0]] + [panel for panel in found[1:] if any(panel.bytes_of(row) for row in rows)]


def _bars(ax: Axes, panel: _Panel, rows: Sequence[Row], ground: str, ink: str, line: str) -> None:
    totals = [sum(panel.bytes_of(row).values()) for row in rows]
    largest = max([*totals, 1])
    # A bar that is far beyond the memory would make all others points: the axis ends at a few times of it.
    end: float = min(largest, 3 * panel.capacity) if panel.capacity and min(totals) < panel.capacity else largest
    end = max(float(end), panel.capacity if panel.capacity <= 1.6 * largest else 0) * 1.16
    for place, row in enumerate(rows):
        left = 0
        for role, colour in COLOURS.items():
            nbytes = panel.bytes_of(row).get(role, 0)
            ax.barh(place, nbytes, left=left, color=colour, height=0.72, linewidth=0)
            left += nbytes
        if left:
            beyond = left > end * 0.87  # there is no room for the number behind it
            ax.text(
                end * 0.992 if beyond else left + end * 0.008,
                place,
                short_bytes(left),
                ha="right" if beyond else "left",
                va="center",
                fontsize=7.5,
                color=ink,
                # It may lie on a bar, or on the line of the memory.
                bbox={"facecolor": ground, "alpha": 0.9, "pad": 0.6, "linewidth": 0},
                zorder=3,
            )
    if 0 < panel.capacity <= end:
        ax.axvline(panel.capacity, color=line, linewidth=1.6)
        label = f"{short_bytes(panel.capacity)} there"
    else:
        label = f"{short_bytes(panel.capacity)} there, beyond the axis" if panel.capacity else "none there"
    ax.set_title(f"{panel.name}\n{label}", color=line if panel.capacity <= end else ink, fontsize=9)
    ax.set_xlim(0, end)
    ax.xaxis.set_major_formatter(lambda value, _: short_bytes(value) if value else "0")
    ax.xaxis.set_major_locator(_bytes_locator(end))


def _bytes_locator(end: float) -> Any:
    """Ticks at powers of two, a few of them."""
    from matplotlib.ticker import MultipleLocator

    step = 1
    while end / step > 5:
        step *= 2
    return MultipleLocator(step)


def _names(ax: Axes, rows: Sequence[Row], config: ZeroConfig, choice: Choice | str, ink: str) -> None:
    auto = None if isinstance(choice, str) else (choice.row.stage, choice.row.offload)

    def name(row: Row) -> str:
        marks = [
            word
            for word, there in (("chosen", is_chosen(row, config)), ("auto", (row.stage, row.offload) == auto))
            if there
        ]
        fits = (
            ""
            if row.fits
            else "  no: " + ("budgets" if row.refused else ", ".join(TIER_NAMES[s.tier] for s in row.shortages))
        )
        return f"{row.stage.value} + {row.offload.value}" + (f"  ({', '.join(marks)})" if marks else "") + fits

    ax.set_yticks(range(len(rows)), [name(row) for row in rows])
    for label, row in zip(ax.get_yticklabels(), rows, strict=True):
        label.set_color(ink)
        label.set_alpha(1.0 if row.fits else 0.6)
        if is_chosen(row, config) or (row.stage, row.offload) == auto:
            label.set_fontweight("bold")
    ax.set_ylim(len(rows) - 0.4, -0.6)


def _style(ax: Axes, ground: str, ink: str, grid: str) -> None:
    ax.set_facecolor(ground)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(grid)
    ax.tick_params(axis="x", colors=ink, length=3, labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=grid, linewidth=0.7)
    ax.set_axisbelow(True)
