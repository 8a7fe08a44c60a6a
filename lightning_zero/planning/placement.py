"""Define each stage by the placement (replicated or sharded) of each role, and each offload setting by the tier of each
role. Other code reads these tables instead of comparing stages."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from lightning_zero.settings import ConfigError, Offload, Stage


class Placement(Enum):
    replicated = "replicated"
    sharded = "sharded"


class Tier(Enum):
    device = "device"
    host = "host"
    nvme = "nvme"


class StageRow(NamedTuple):
    """One stage: whether each role of a bucket is replicated or sharded between steps."""

    compute_param: Placement
    grad: Placement  # sharded: reduced at every micro-batch; replicated: accumulated until the last
    master: Placement  # master_param and optim_state


class TierRow(NamedTuple):
    """One offload choice: the tier of each role of a bucket between steps."""

    master: Tier  # master_param and optim_state
    grad: Tier
    compute_param: Tier

    @property
    def steps_on_host(self) -> bool:
        return self.master is not Tier.device

    @property
    def uses_host_or_files(self) -> bool:
        """Return whether a role is kept on the host or in files."""
        return any(tier is not Tier.device for tier in self)

    @property
    def gathers_from_host(self) -> bool:
        """Return whether compute parameters come to the device from the host or files, for gathers or after steps."""
        return self.steps_on_host or self.compute_param is not Tier.device


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
assert all(row.grad in (_D, _H) for row in OFFLOADS.values()), "gradients rest on the device or in plain host memory"
ON_DEVICE = OFFLOADS[Offload.none]

# The row, at every stage, of norms that keep fp32, and of parameters without a placeholder (0-d, one element, empty,
# integers, complex). Only ``grad``, which says when gradients are reduced, depends on the stage.
REPLICATED = STAGES[Stage.zero0]


def logical_collectives(row: StageRow, micro_batches: int, *, stays_gathered: bool) -> dict[str, int]:
    """Return how many collectives a bucket takes in a step, by name. ``stays_gathered``: whether parameters of stage 3
    stay gathered from each forward to its backward."""
    counts = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    if row.compute_param is _S:
        counts["all_gather"] = micro_batches if stays_gathered else 2 * micro_batches
    elif row.master is _S:
        counts["all_gather"] = 1
    reductions = micro_batches if row.grad is _S else 1
    counts["reduce_scatter" if row.master is _S else "all_reduce"] = reductions
    return counts


class UnitBytes(NamedTuple):
    """Bytes that this rank keeps between steps for one unit, without compute parameters."""

    name: str
    state_nbytes: int  # master_param and optim_state
    grad_nbytes: int


class Budgets(NamedTuple):
    """Bytes that one rank may keep on each tier between steps."""

    device: int
    host: int
    nvme: int

    def with_given(self, device: int | None, host: int | None, nvme: int | None) -> Budgets:
        """Return a copy of these budgets in which each argument that is not None replaces the budget of its tier."""
        pairs = zip((device, host, nvme), self, strict=True)
        return Budgets(*(found if given is None else given for given, found in pairs))


def default_budgets(device: int, host: int, nvme: int, local_ranks: int) -> Budgets:
    """Return a rank's default budgets in bytes. Half of the device is left for activations and gathered units."""
    return Budgets(device // 2, int(host * 0.9) // local_ranks, nvme)


def split_by_budget(units: Sequence[UnitBytes], budgets: Budgets) -> list[TierRow]:
    """Choose the tiers of each unit's masters, optimizer state and gradients. As many of the first units as fit are on
    the device, because the next forward needs them first. Gradients of all other units are on the host, with the
    masters and state of as many of these units as then fit. Masters and state of the last units are in files. Raises
    ConfigError, with the partial plan, if the budgets are too small."""
    state = [unit.state_nbytes for unit in units]
    grad = [unit.grad_nbytes for unit in units]
    count = len(units)
    near = next(n for n in range(count, -1, -1) if sum(state[:n]) + sum(grad[:n]) <= budgets.device or not n)
    waiting = sum(grad[near:])
    hosted = next(n for n in range(count, near - 1, -1) if sum(state[near:n]) + waiting <= budgets.host or n == near)
    rows = [TierRow(_D, _D, _D)] * near + [TierRow(_H, _H, _D)] * (hosted - near)
    if waiting > budgets.host or sum(state[hosted:]) > budgets.nvme:
        raise ConfigError(_does_not_fit(units, rows, budgets))
    return rows + [TierRow(_N, _H, _D)] * (count - hosted)


def _does_not_fit(units: Sequence[UnitBytes], rows: Sequence[TierRow], budgets: Budgets) -> str:
    needed = sum(u.state_nbytes + u.grad_nbytes for u in units)
    names = [u.name or "(root)" for u in units]
    placed = [
        f"  {name}: {unit.state_nbytes:,} B of state on {row.master.name}"
        for name, unit, row in zip(names, units, rows, strict=False)
    ]
    kept = sum(u.grad_nbytes for u in units[len(rows) :])
    return (
        f"zero/offload=auto: optimizer state, master weights and gradients of this rank need {needed:,} B; the budgets "
        f"are device {budgets.device:,} B, host {budgets.host:,} B, nvme {budgets.nvme:,} B. The placement up to "
        f"{names[len(rows)]}, which does not fit (gradients of units that are stepped from files, {kept:,} B, stay on "
        "the host):\n"
        + "\n".join(placed)
        + "\nRaise zero.offload.device_budget, host_budget or nvme_budget (with zero.offload.nvme_path), or use more "
        "ranks."
    )
