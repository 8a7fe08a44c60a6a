"""A stage is a row of placements, an offload choice a row of tiers. Nothing else in the engine knows their names."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from lightning_zero.config import Offload, Stage


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
