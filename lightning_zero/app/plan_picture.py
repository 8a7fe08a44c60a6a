"""Draw the memory plan: one bar per stage and offload setting, stacked by roles, beside the available memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_zero.app.plan_tables import TIER_NAMES, is_chosen, short_bytes
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.choose import Choice
from lightning_zero.planning.fit import Machine, Row
from lightning_zero.planning.memory import on_tier
from lightning_zero.planning.placement import Tier
from lightning_zero.settings import ConfigError, ZeroConfig, check_installed

SUFFIXES = (".png", ".svg")
# Okabe and Ito's palette, for readers with a colour vision deficiency.
ROLES = {
    Role.compute_param: ("#0072b2", "parameters"),
    Role.master_param: ("#56b4e9", "master weights"),
    Role.optim_state: ("#009e73", "optimizer state"),
    Role.grad: ("#e69f00", "gradients"),
    Role.gathered: ("#cc79a7", "gathered parameters"),
    Role.reducing: ("#d55e00", "gradients in reduction"),
    Role.staging: ("#999999", "transfer buffers"),
    Role.activation: ("#f0e442", "activations, batch"),
    Role.whole_copy: ("#882255", "copy of the model after fit"),  # of another palette
}
GROUND, INK, LINE = "#ffffff", "#1a1a1a", "#b00020"  # background, text, line of the available memory
Panel = tuple[str, int, list[dict[Role, int]]]  # a tier: its name, its capacity, and the bytes by role of each bar


def check_picture(path: str) -> None:
    """Raise ConfigError if matplotlib or the folder of ``path`` is missing, or the suffix of ``path`` is unknown."""
    check_installed("picture", ["matplotlib"])
    if Path(path).suffix not in ("", *SUFFIXES):
        raise ConfigError(f"picture: expected a name that ends in {' or '.join(SUFFIXES)}, or without, got {path!r}.")
    if not (folder := Path(path).absolute().parent).is_dir():
        raise ConfigError(f"picture: expected a folder that exists, got '{folder}'. Change picture.")


def draw(
    path: str, title: str, machine: Machine, rows: Sequence[Row], config: ZeroConfig, choice: Choice | str
) -> list[str]:
    """Draw the plan to the file ``path``, or to ``path.png`` and ``path.svg`` if it has no suffix. Return the files."""
    import matplotlib.figure

    panels = _panels(machine, rows)
    style: dict[Any, Any] = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "plan", "axes.facecolor": GROUND}
    style |= {"axes.axisbelow": True, "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False}
    style |= {"axes.grid": True, "axes.grid.axis": "x", "grid.color": INK, "grid.alpha": 0.15, "axes.edgecolor": INK}
    style |= {f"{what}.color": INK for what in ("text", "xtick", "ytick")} | {"ytick.major.size": 0, "figure.dpi": 120}
    with matplotlib.rc_context(style):
        figure = matplotlib.figure.Figure((11.0, 2.2 + 0.27 * len(rows)), facecolor=GROUND, layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, panel in zip(axes, panels, strict=True):
            _bars(ax, *panel)
        _names(axes, rows, config, choice)
        used = {role for _, _, shares in panels for share in shares for role in share}
        handles = [matplotlib.patches.Patch(color=c, label=label) for role, (c, label) in ROLES.items() if role in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(used)), frameon=False)
        figure.suptitle(title, fontsize=10)
        files = [path] if Path(path).suffix else [path + suffix for suffix in SUFFIXES]
        for file in files:
            figure.savefig(f"{file}.part", format=Path(file).suffix[1:], metadata={"Date": None})
            os.replace(f"{file}.part", file)
    return files


def _panels(machine: Machine, rows: Sequence[Row]) -> list[Panel]:
    """Return one panel for GPU memory (host memory without GPUs), and one for each other tier that ``rows`` use."""

    def panel(name: str, capacity: int, ranks: int, *tiers: Tier) -> Panel:
        def share(row: Row) -> dict[Role, int]:  # at the moment of the largest sum over the tiers
            most = max(row.moments, key=lambda held: sum(on_tier(held, tier) for tier in tiers))
            return {role: n * ranks for role in Role if (n := sum(most[role, tier] for tier in tiers))}

        return name, capacity, [share(row) if row.peaks else {} for row in rows]

    name = f"host memory, of {machine.gpus} {'process(es)' if machine.shared else 'GPU(s)'}"
    panels = [] if machine.shared else [panel("each GPU", machine.gpu_memory, 1, Tier.device)]
    panels += [panel(name, machine.host_memory, machine.gpus, Tier.host, *[Tier.device] * machine.shared)]
    panels += [panel("disk of a host", machine.nvme, machine.gpus, Tier.nvme)]
    return panels[:1] + [other for other in panels[1:] if any(other[2])]


def _bars(ax: Any, name: str, capacity: int, shares: list[dict[Role, int]]) -> None:
    totals = [sum(share.values()) for share in shares]
    largest = max([*totals, 1])
    # The axis ends at a few times the memory, so that one large bar does not shrink all others to points.
    end = min(largest, 3 * capacity) if capacity and min(totals) < capacity else largest
    end = int(max(end, capacity if capacity <= 1.6 * largest else 0) * 1.16)
    left = [0] * len(shares)
    for role, (colour, _) in ROLES.items():
        widths = [share.get(role, 0) for share in shares]
        ax.barh(range(len(shares)), widths, left=left, color=colour, height=0.72, linewidth=0)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    box = {"facecolor": GROUND, "alpha": 0.9, "pad": 0.6, "linewidth": 0}  # the number may lie on a bar or line
    for place, total in enumerate(totals):
        beyond = total > end * 0.87  # no space for the number right of the bar
        x, side = (end * 0.992, "right") if beyond else (total + end * 0.008, "left")
        if total:
            ax.text(x, place, short_bytes(total), ha=side, va="center", fontsize=7.5, color=INK, bbox=box, zorder=3)
    inside = capacity <= end
    label = f"{short_bytes(capacity)} available{'' if inside else ', off the axis'}" if capacity else "none available"
    if capacity and inside:
        ax.axvline(capacity, color=LINE, linewidth=1.6)
    ax.set_title(f"{name}\n{label}", color=LINE if inside else INK, fontsize=9)
    step = 1 << max(0, -(-end // 5) - 1).bit_length()  # a power of two with at most five ticks
    ax.set_xlim(0, end)
    ax.set_xticks(range(0, end, step), [short_bytes(value) if value else "0" for value in range(0, end, step)])


def _names(axes: Any, rows: Sequence[Row], config: ZeroConfig, choice: Choice | str) -> None:
    """Label each bar: on the left its stage and offload setting, on the right whether it fits and if it is chosen."""
    auto = None if isinstance(choice, str) else (choice.row.stage, choice.row.offload)
    first, last = axes[0], axes[-1]
    first.set_yticks(range(len(rows)), [f"{row.stage.value} + {row.offload.value}" for row in rows])
    for place, (label, row) in enumerate(zip(first.get_yticklabels(), rows, strict=True)):
        takers = ["your settings"] * is_chosen(row, config) + ["auto takes it"] * ((row.stage, row.offload) == auto)
        lacking = "the budgets" if row.refused else " and ".join(TIER_NAMES[s.tier] for s in row.shortages)
        outcome = "; ".join(["fits" if row.fits else f"too large for {lacking}", *takers])
        style = {"alpha": 1.0 if row.fits else 0.6, "fontweight": "bold" if takers else "normal"}
        label.set(**style)
        last.annotate(outcome, (1.05, place), xycoords=("axes fraction", "data"), va="center", fontsize=8, **style)
    first.set_ylim(len(rows) - 0.4, -0.6)
