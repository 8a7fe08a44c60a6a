"""Print the memory plan: bytes and seconds for each stage and offload setting, and what would make them fit. Or draw
the plan: a bar for each stage and offload setting, stacked by roles, beside the available memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.table import Table

from lightning_zero.planning.activations import Activations
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.choose import Choice, human_bytes, seconds_text
from lightning_zero.planning.fit import Advice, Machine, Model, Row, best
from lightning_zero.planning.memory import on_tier
from lightning_zero.planning.placement import Tier
from lightning_zero.planning.speed import Rates
from lightning_zero.settings import ConfigError, ZeroConfig, check_installed

WIDTH = 120  # columns if the output is not a terminal

TIER_NAMES = {Tier.device: "GPU", Tier.host: "host", Tier.nvme: "disk"}
TIER_MARKS = {Tier.device: "", Tier.host: " h", Tier.nvme: " d"}
ROLE_COLUMNS = {
    "params": (Role.compute_param,),
    "grads": (Role.grad,),
    "optimizer": (Role.master_param, Role.optim_state),
}
PEAK_COLUMNS = ("peak/GPU", "peak/host", "disk", "fits")
TIME_COLUMNS = ("gathers", "reductions", "step", "bound by")


@dataclass(frozen=True)
class Described:
    """A model whose memory is planned, with facts about it that only the printed text needs."""

    model: Model
    precision: str  # choice of zero/precision, such as bf16
    other: Activations | None = None  # activations with checkpointing switched the other way; None: not measured
    why_not: str = ""  # why activations could not be measured
    assumed_states: str = ""  # why the state of the optimizers is assumed; empty: it is known


def is_chosen(row: Row, chosen: ZeroConfig) -> bool:
    return (row.stage, row.offload) == (chosen.stage.name, chosen.offload.name)


def short_bytes(nbytes: float) -> str:
    """Return bytes as text in powers of 1024: ``1536`` -> ``1.5K``."""
    number, _, unit = human_bytes(nbytes).partition(" ")
    return number + unit.removesuffix("iB").removesuffix("B")


def _cell(row: Row, roles: tuple[Role, ...]) -> str:
    parts = []
    for tier in Tier:
        nbytes = sum(row.rest[role, tier] for role in roles)
        if nbytes:
            parts.append((nbytes, short_bytes(nbytes) + TIER_MARKS[tier]))
    most = max((nbytes for nbytes, _ in parts), default=0)
    return " ".join(text for nbytes, text in parts if nbytes * 100 > most) or "-"  # none below 1 %


def machine_line(machine: Machine) -> str:
    nvme = f", {short_bytes(machine.nvme)} of disk" if machine.nvme else ", no disk"
    host = f"{short_bytes(machine.host_memory)} of host memory{nvme}"
    if machine.shared:
        what = f"{machine.gpus} process(es) without GPU in {host}"
    else:
        what = f"{machine.gpus} GPU(s) of {short_bytes(machine.gpu_memory)} each, {host}"
    return what if machine.nodes == 1 else f"{machine.nodes} hosts, each with {what}"


def title_of(model: Model, machine: Machine, precision: str) -> str:
    count = sum(shape.numel * shape.parts for shape in model.shapes)
    return f"{count:,} parameters, {precision}; {machine_line(machine)}"


def _peaks(row: Row) -> list[str]:
    peaks = (row.per_rank[Tier.device], row.per_host[Tier.host], row.per_host[Tier.nvme])
    missing = "no: " + ", ".join(TIER_NAMES[s.tier] for s in row.shortages)
    fits = "yes" if row.fits else "no: budgets" if row.refused else missing
    return [*(short_bytes(nbytes) if nbytes else "-" for nbytes in peaks), fits]


def _times(row: Row) -> list[str]:
    sent = [row.sent.gathers, row.sent.reductions] if row.sent is not None else [0.0, 0.0]
    cells = [short_bytes(nbytes) if nbytes else "-" for nbytes in sent]
    if row.time is None:
        return [*cells, "-", "-"]
    return [*cells, seconds_text(row.time.seconds), row.time.binding.replace("_", " ")]


def tables_of(rows: Sequence[Row], config: ZeroConfig, width: int) -> list[Table]:
    """Return a table of bytes and a table of seconds. If the first is wider than ``width`` characters, split it into a
    table of peak bytes and one of bytes between steps."""
    rest = (lambda row: [_cell(row, roles) for roles in ROLE_COLUMNS.values()], tuple(ROLE_COLUMNS))
    peaks, times = (_peaks, PEAK_COLUMNS), (_times, TIME_COLUMNS)
    wide = _table(rows, config, None, [rest, peaks])
    if Console(width=sys.maxsize).measure(wide).maximum <= width:
        return [wide, _table(rows, config, None, [times])]
    return [_table(rows, config, box.SIMPLE_HEAD, [part]) for part in (peaks, rest, times)]


def _table(
    rows: Sequence[Row],
    config: ZeroConfig,
    lines: box.Box | None,
    parts: Sequence[tuple[Callable[[Row], list[str]], tuple[str, ...]]],
) -> Table:
    """Return a table with a line for each of ``rows``, framed by ``lines`` (None: rich's default). ``parts``: groups of
    columns, each as a function that returns a row's cells, and the names of the columns."""
    style: dict[str, Any] = {} if lines is None else {"box": lines, "padding": 0, "show_edge": False}
    table = Table(pad_edge=False, **style)
    for name in ("", "stage", "offload"):
        table.add_column(name, no_wrap=True)
    for _, names in parts:
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if previous is not None and row.stage is not previous:
            table.add_section()
        previous = row.stage
        chosen = is_chosen(row, config)
        table.add_row(
            ">" if chosen else "",
            row.stage.value,
            row.offload.value,
            *(cell for cells, _ in parts for cell in cells(row)),
            style="bold" if chosen else None,
        )
    return table


def advice_lines(machine: Machine, rows: Sequence[Row], advices: Sequence[Advice]) -> list[str]:
    """Return a line for each stage and offload that does not fit, with the memory that it lacks and a remedy. The last
    line says which stage and offload to try first."""
    last = "Nothing fits: use more hosts or a smaller model."
    if (first := best(rows)) is not None:
        last = f"Try first: zero/stage={first.stage.value} zero/offload={first.offload.value}"
    return [
        f"{row.stage.value} + {row.offload.value}: {_lack(row)}; {_remedy(row, advice, machine)}"
        for row, advice in zip(rows, advices, strict=True)
        if not row.fits
    ] + [last]


def _lack(row: Row) -> str:
    if row.refused:
        return "the budgets are too small"
    each = {Tier.device: "each GPU", Tier.host: "the host", Tier.nvme: "its disk"}
    return "needs " + ", ".join(f"{short_bytes(s.nbytes)} more on {each[s.tier]}" for s in row.shortages)


def _remedy(row: Row, advice: Advice, machine: Machine) -> str:
    ways = []
    if any(s.tier is Tier.nvme for s in row.shortages) and not machine.nvme:
        ways.append("machine.nvme or zero.offload.nvme_path")
    elif advice.gpus is not None:
        ways.append(f"{advice.gpus} {'processes' if machine.shared else 'GPUs'}")
    if advice.offload is not None:
        ways.append(f"zero/offload={advice.offload.value}")
    return f"fits with {' or '.join(ways)}" if ways else "does not fit on any number of such hosts"


def legend(described: Described, rows: Sequence[Row]) -> list[str]:
    """Return the sentences printed below the tables, which explain their columns."""
    model, assumed = described.model, described.assumed_states
    several = model.limits.micro_batches > 1
    when = "between micro-batches" if several else "before the step"
    stage_1 = "not sharded until the reduction" if several else "sharded, but whole before the reduction"
    return [
        f">: your settings. params, grads, optimizer: bytes of one rank {when} "
        f"(h: on the host, d: on disk). At stage zero1 gradients are {stage_1}.",
        f"peak/host, disk: all ranks of a host together. {activations_line(described)} "
        "gathers, reductions: bytes that a rank sends per step. K, M, G, T: powers of 1024.",
        after_run_line(model, rows),
    ] + [f"{model.states} tensors of optimizer state for each parameter are assumed: {assumed}."] * bool(assumed)


def after_run_line(model: Model, rows: Sequence[Row]) -> str:
    """Return a line that says whether a run ends with a copy of the whole module in host memory, and its size."""
    setting = f"zero.gather_after_fit={json.dumps(model.gather_after_fit)}"
    if model.gather_after_fit is False:
        return f"After a run the module stays sharded ({setting})."
    size = f"{short_bytes(model.copy_nbytes)} of each host"
    sharded = [f"{row.stage.value} + {row.offload.value}" for row in rows if row.fits and not row.is_whole]
    if not any(row.is_whole for row in rows):
        return f"After a run the module stays sharded: a whole copy takes {size}, which do not fit ({setting})."
    without = f", except with {', '.join(sharded)}, where it does not fit" if sharded else ""
    return f"After a run a copy of the whole module takes {size}; peak/host includes it{without} ({setting})."


def activations_line(described: Described) -> str:
    """Return a line that says how many bytes of activations the peaks include, or why they include none."""
    model = described.model
    if model.activations is None:
        return f"Activations are not counted{f': {described.why_not}' if described.why_not else ''}."
    found = model.activations.interpolate(model.samples or model.activations.sizes[0])
    most = max(found.peak(backward=False), found.peak(backward=True))
    other = ""
    if described.other is not None:
        less = max(described.other.peak(backward=False), described.other.peak(backward=True))
        with_it = "without" if model.recomputes else "with"
        other = f" ({short_bytes(less)} {with_it} zero.activation_checkpointing=blocks)"
    return (
        f"Peaks include {short_bytes(most)} of activations for {model.samples} sample(s){other}, "
        f"{short_bytes(found.saved)} of them kept for the backward."
        + (
            f" For divided sequences a rank also sends {short_bytes(found.exchanged)} per micro-batch."
            if found.exchanged
            else ""
        )
    )


RATE_NAMES = {
    "compute": "{} FLOP/s",
    "device_memory": "{}B/s of device memory",
    "host_memory": "{}B/s of host memory",
    "to_device": "{}B/s to the device",
    "to_host": "{}B/s from the device",
    "disk_read": "{}B/s read",
    "disk_write": "{}B/s written",
    "network": "{}B/s sent",
}


def rates_line(rates: Rates, given: Sequence[str], *, shared: bool) -> str:
    """Return a line on the rates that the expected seconds assume. ``given``: names of rates that the user has set."""
    names = [name for name in RATE_NAMES if not (shared and name in ("to_device", "to_host", "device_memory"))]
    texts = [RATE_NAMES[name].format(_decimal(getattr(rates, name))) for name in names]
    if not given:
        how = "assumed: set machine.rates.*"
    elif set(names) <= set(given):
        how = "given"
    else:
        how = f"assumed except for {', '.join(f'machine.rates.{name}' for name in given)}"
    return f"step: expected time at these rates of a rank: {', '.join(texts)}; {how}."


def _decimal(value: float) -> str:
    """Return a number as text in powers of 1000: ``2.5e12`` -> ``2.5 T``."""
    unit, prefix = pick_unit_and_suffix(value, ["", "k", "M", "G", "T", "P"], 1000)  # type: ignore[arg-type]
    return f"{value / unit:.3g} {prefix}"


def auto_line(choice: Choice | str) -> str:
    """Return a line that names what ``auto`` selects, and the largest micro-batch, or says why nothing fits."""
    if isinstance(choice, str):
        return f"auto selects nothing: {choice}"
    most = "" if choice.samples is None else f" The largest micro-batch that fits: {choice.samples} sample(s) per rank."
    return f"auto selects {choice.rows}: {choice.reason}.{most}"


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
    """Label each bar: on the left its stage and offload setting, on the right whether it fits and who chooses it."""
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
