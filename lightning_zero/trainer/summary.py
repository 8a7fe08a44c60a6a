"""Print the chosen units at the start of a run, and the planned and held bytes at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from lightning_zero.engine import Engine
from lightning_zero.engine.units.unit import Unit
from lightning_zero.planning import memory
from lightning_zero.planning.activations import Activations, peaks_with
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.choose import human_bytes
from lightning_zero.planning.memory import Phase
from lightning_zero.planning.placement import ON_DEVICE, Tier
from lightning_zero.trainer.memory.held_bytes import held_bytes, limits_of, plan_of, planned_now, state_tensors

LARGE = 64 * 2**20  # bytes; smaller models get no warning of :func:`large_unit`
Held = tuple[str, str, int, int | None]  # role, tier, bytes planned and measured


def setup_of(engine: Engine) -> dict[str, str | int]:
    """Return a run's stage, offload, precision, and numbers of ranks and parameters, as entries of results.json."""
    rows = {key: getattr(engine.config, key).name.name for key in ("stage", "offload")}
    numbers = {
        "ranks": engine.comm.world_size,
        "parameters": sum(math.prod(i.saved_shape) for u in engine.units for i in u.infos),
    }
    return {**rows, "precision": engine.passes.precision.name, **numbers}


def _where(unit: Unit) -> str:
    """Return text that says where the unit's values are kept: the tier's name if they are all on one tier, else for
    example ``parameters device, gradients host, optimizer nvme``."""
    rows = [b.plan.tiers for b in unit.buckets]
    row = next((r for r in rows if r != ON_DEVICE), ON_DEVICE)  # tiny buckets may stay on the device
    if len(set(row)) == 1:
        return row.master.name
    return f"parameters {row.compute_param.name}, gradients {row.grad.name}, optimizer {row.master.name}"


def large_unit(engine: Engine) -> str | None:
    """Return a warning if stage 3 gathers most of the parameters at once, because one unit holds them; else None."""
    sizes = {unit: sum(b.full.nbytes for b in unit.buckets if b.plan.reshards) for unit in engine.units}
    total, largest = sum(sizes.values()), max(sizes, key=lambda unit: sizes[unit])
    if 2 * sizes[largest] <= total or total == 0:
        return None
    module = engine.module.get_submodule(largest.name)
    inner = sorted(
        {type(m).__name__ for m in module.modules() if m is not module and any(True for _ in m.parameters())}
    )
    classes = ", ".join(inner[:6]) + (", ..." if len(inner) > 6 else "")
    way = f"set zero.unit.classes to classes inside it: {classes}" if inner else "it has no modules that could be units"
    return f"{100 * sizes[largest] // total} % of the parameters are gathered at once, as {largest.title}; {way}"


def print_units(engine: Engine) -> None:
    """Print a table of the units. Adjacent units with equal values share a line."""

    def facts(unit: Unit) -> tuple[int, int, str]:
        return sum(i.numel for i in unit.infos), sum(b.full.nbytes for b in unit.buckets), _where(unit)

    precision = engine.passes.precision.name
    table = Table(
        title=f"{engine.config.stage.name.name}, {precision}, {engine.comm.world_size} rank(s)", title_justify="left"
    )
    for column in ("unit", "parameters", "gathered", "kept on"):
        table.add_column(column, justify="left" if column in ("unit", "kept on") else "right", overflow="fold")
    for (numel, nbytes, where), same in groupby(engine.units, facts):
        units = list(same)
        name = units[0].title if len(units) == 1 else f"{units[0].title} .. {units[-1].title} ({len(units)} units)"
        each = "" if len(units) == 1 else " each"
        table.add_row(name, f"{numel:,}{each}", f"{human_bytes(nbytes)}{each}", where)
    if sum(b.full.nbytes for b in engine.buckets) >= LARGE:
        table.caption, table.caption_justify = large_unit(engine), "left"
    Console(stderr=True).print(table)


def held_rows(engine: Engine, micro_batches: int, activations: Activations | None = None) -> list[Held]:
    """Return this rank's rows (role, tier, bytes planned, bytes measured) at the end of a run. The last row has the
    peak bytes of a step, which are measured only on GPUs (else None)."""
    engine.passes.after_step.wait_for_all()  # no agreement, since other ranks do not call this
    buckets, states = plan_of(engine), state_tensors(engine)
    held = held_bytes(engine)
    plan = planned_now(engine, held)
    rows: list[Held] = [
        (role.value, tier.value, plan[role, tier], held[role, tier])
        for role in Role
        for tier in Tier
        if plan[role, tier] or held[role, tier]
    ]
    accelerator = engine.comm.streams.accelerator
    limits = limits_of(engine, micro_batches)
    peaks = peaks_with(buckets, limits, activations, engine.comm.shard.index, state_tensors=states)
    what = "peak of a step" if activations is not None else "peak of a step, activations not planned"
    if accelerator.has_streams:
        most = max(memory.on_tier(peaks[phase], Tier.device) for phase in Phase)
        rows.append((what, "device", most, accelerator.peak_nbytes()))
    else:
        most = max(memory.on_tier(held, Tier.device) + memory.on_tier(held, Tier.host) for held in peaks.values())
        rows.append((what, "device, host", most, None))
    return rows


def print_held(rows: Sequence[Held]) -> None:
    table = Table(title="bytes of rank 0 between steps", title_justify="left")
    table.add_column("role")
    table.add_column("kept on")
    for column in ("planned", "measured"):
        table.add_column(column, justify="right")
    for role, tier, planned, measured in rows:
        table.add_row(role, tier, human_bytes(planned), "not measured" if measured is None else human_bytes(measured))
    Console(stderr=True).print(table)
