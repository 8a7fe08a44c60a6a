"""A stage is a row of placements, an offload choice a row of tiers. Nothing else in the engine knows their names."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from lightning_zero.config import ConfigError, Offload, Stage


class Placement(Enum):
    replicated = "replicated"
    sharded = "sharded"


class Tier(Enum):
    device = "device"
    host = "host"
    nvme = "nvme"


class StageRow(NamedTuple):
    """Where each role of a bucket is at rest."""

    compute_param: Placement
    grad: Placement  # sharded: reduced at every micro-batch; replicated: accumulated locally until the last one
    master: Placement  # master_param and optim_state


class TierRow(NamedTuple):
    """The tier on which each role is at rest."""

    master: Tier  # master_param and optim_state
    grad: Tier
    compute_param: Tier

    @property
    def steps_on_host(self) -> bool:
        return self.master is not Tier.device


_D, _H, _N = Tier.device, Tier.host, Tier.nvme
_R, _S = Placement.replicated, Placement.sharded

STAGES: dict[Stage, StageRow] = {
    Stage.zero0: StageRow(compute_param=_R, grad=_R, master=_R),
    Stage.zero1: StageRow(compute_param=_R, grad=_R, master=_S),
    Stage.zero2: StageRow(compute_param=_R, grad=_S, master=_S),
    Stage.zero3: StageRow(compute_param=_S, grad=_S, master=_S),
}

OFFLOADS: dict[Offload, TierRow] = {
    Offload.none: TierRow(_D, _D, _D),
    Offload.optimizer_cpu: TierRow(_H, _H, _D),
    Offload.cpu: TierRow(_H, _H, _H),
    Offload.optimizer_nvme: TierRow(_N, _H, _D),
    Offload.optimizer_cpu_param_nvme: TierRow(_H, _H, _N),
    Offload.nvme: TierRow(_N, _H, _N),
}
ON_DEVICE = OFFLOADS[Offload.none]

# Parameters that cannot be shown as a placeholder (0-d, one element, integers) keep this row at every stage.
REPLICATED = STAGES[Stage.zero0]


def logical_collectives(row: StageRow, micro_batches: int, *, stays_gathered: bool) -> dict[str, int]:
    """Operations asked of ``collectives.py`` for one bucket in one optimizer step of ``micro_batches`` backwards.

    Args:
        row: the bucket's placements.
        micro_batches: backwards per step.
        stays_gathered: the unit stays gathered between forward and backward (the root, the last block).
    """
    counts = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    if row.compute_param is _S:
        counts["all_gather"] = micro_batches if stays_gathered else 2 * micro_batches
    elif row.master is _S:
        counts["all_gather"] = 1
    reductions = micro_batches if row.grad is _S else 1
    counts["reduce_scatter" if row.master is _S else "all_reduce"] = reductions
    return counts


class UnitBytes(NamedTuple):
    """What one unit needs at rest on this rank, beside its compute parameters."""

    name: str
    state_nbytes: int  # master_param and optim_state
    grad_nbytes: int


class Budgets(NamedTuple):
    """Bytes that one rank may hold at rest on each tier."""

    device: int
    host: int
    nvme: int


def split_by_budget(units: Sequence[UnitBytes], budgets: Budgets) -> list[TierRow]:
    """Tiers of each unit's optimizer under budgets: the nearest tier that has room, for units in forward order.

    The step is needed first by the first units of the next forward, so these stay nearest; gradients rest on the
    device beside a resident optimizer, and on the host beside one that is not.

    Raises:
        ConfigError: the budgets cannot hold the units; the message holds the plan as far as it got.
    """
    left = dict(zip((_D, _H, _N), budgets, strict=True))
    rows: list[TierRow] = []
    nearest = 0
    order = (_D, _H, _N)
    for unit in units:
        for place in range(nearest, len(order)):
            tier = order[place]
            grads = _D if tier is _D else _H
            needs = {tier: unit.state_nbytes}
            needs[grads] = needs.get(grads, 0) + unit.grad_nbytes
            if all(left[t] >= n for t, n in needs.items()):
                for t, n in needs.items():
                    left[t] -= n
                rows.append(TierRow(master=tier, grad=grads, compute_param=_D))
                nearest = place  # never back: later units are needed later
                break
        else:
            raise ConfigError(_no_room(units, rows, budgets))
    return rows


def _no_room(units: Sequence[UnitBytes], rows: Sequence[TierRow], budgets: Budgets) -> str:
    needed = sum(u.state_nbytes + u.grad_nbytes for u in units)
    names = [u.name or "(root)" for u in units]
    placed = [
        f"  {name}: {unit.state_nbytes:,} B of state on {row.master.name}"
        for name, unit, row in zip(names, units, rows, strict=False)
    ]
    return (
        f"zero/offload=auto: optimizer state, master weights and gradients of this rank need {needed:,} B; the budgets "
        f"hold device {budgets.device:,} B, host {budgets.host:,} B, nvme {budgets.nvme:,} B. The plan until room ran "
        "out at "
        f"{names[len(rows)]}:\n" + "\n".join(placed) + "\nRaise zero.offload.device_budget, host_budget or "
        "nvme_budget (with zero.offload.nvme_path), or use more ranks."
    )
