"""Refuse parameters for which hosts have no room, before they are allocated: without GPUs the device is the host."""

from __future__ import annotations

import socket
from collections import defaultdict
from functools import partial

from torch import nn

from lightning_zero.device import accelerator_of
from lightning_zero.engine.units.describe import describe_units
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.fit import Machine, plan_row
from lightning_zero.planning.placement import Tier
from lightning_zero.ranks.posts import machine
from lightning_zero.settings import ConfigError, Offload, ZeroConfig
from lightning_zero.tiers.limits import available_host_memory, free_swap
from lightning_zero.trainer.memory.auto_row import planned_model
from lightning_zero.trainer.run import Run


def check_host_room(strategy: Run, module: nn.Module, config: ZeroConfig) -> None:
    """Raise ConfigError on all ranks if a host lacks memory for its ranks' shards of a module on meta. Collective.

    Gradients, optimizer state and activations are left out, as it is not known here which parameters get them. A
    budget that the user gives is believed.
    """
    if accelerator_of(strategy.root_device).has_streams or config.offload.host_budget is not None:
        return
    if config.offload.name is Offload.auto:  # follows from what there is
        return
    what = "room for parameters"
    needed = strategy._together(what, partial(_needed, strategy, module, config))
    own = (machine(), socket.gethostname(), needed, available_host_memory() + free_swap())
    hosts = defaultdict(list)
    for key, *values in strategy._gather_objects(own, what):
        hosts[key].append(values)
    for ranks in hosts.values():
        want, free = sum(rank[1] for rank in ranks), min(rank[2] for rank in ranks)
        if want > free:
            raise ConfigError(
                f"zero.offload: expected room for the parameters of {len(ranks)} rank(s) on host {ranks[0][0]}, "
                f"{want:,} bytes, got {free:,} bytes that are available (in its cgroup, or on the machine), "
                "because without GPUs a device's memory is the host's. Use GPUs or more hosts, zero/offload=nvme, "
                "zero/precision=bf16_true, or a smaller model (python -m lightning_zero.plan shows all of them); where "
                "memory grows as it is used, zero/offload=cpu with zero.offload.host_budget, which is believed."
            )


def _needed(strategy: Run, module: nn.Module, config: ZeroConfig) -> int:
    """Return the bytes that this rank's shards of parameters will take, beside what the module has already."""
    if not any(param.is_meta for param in module.parameters()):
        return 0
    units = describe_units(module, config, strategy.precision_plugin.row)
    ranks, nodes = strategy.world_size // strategy.num_nodes, strategy.num_nodes
    there = Machine(ranks, 0, available_host_memory(), 0, nodes, shared=True, hybrid_shard=config.hybrid_shard)
    model = planned_model(units, config, 1, states=0)
    row = plan_row(model, config.stage.name, config.offload.name, there, config.offload)
    rest = sum(n for (role, tier), n in row.rest.items() if role is not Role.grad and tier is not Tier.nvme)
    return max(0, rest - sum(param.nbytes for param in module.parameters() if not param.is_meta))
