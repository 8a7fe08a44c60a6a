"""Builds parts of an engine: what may be refused first, and what is put around and into the modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_zero.config import (
    ConfigError,
    Precision,
    Recompute,
    ZeroConfig,
    check_grad_comm_dtype,
    check_rounding,
    check_state_dtype,
)
from lightning_zero.engine.passes.compiled import check_compiled_blocks, check_compiler
from lightning_zero.engine.passes.hooks import ENGINE
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.recompute import check_blocks, recompute_blocks
from lightning_zero.engine.units import describe
from lightning_zero.engine.units.unit import Unit
from lightning_zero.engine.vertical.coupled import check_divided, units_around, whole_batch_units
from lightning_zero.engine.vertical.units import Vertical
from lightning_zero.timeline.record import check_timeline


def describe_checked(
    module: nn.Module, config: ZeroConfig, precision: Precision, group: Any
) -> list[describe.UnitGroup]:
    """Describe the units of ``module``, after the checks that may refuse it on one rank alone. Sends no message."""
    found = module.__dict__.get(ENGINE)
    if found is not None and found.shards(module):
        raise ConfigError("this module is sharded already. Call engine.release() before it is sharded again.")
    if config.comm.even_alone and group is None:
        raise ConfigError(
            "zero.comm.even_alone: expected a process group to send messages over, got none. Call "
            "torch.distributed.init_process_group first, or set zero.comm.even_alone=false."
        )
    check_rounding(config.precision.stochastic_rounding, precision)
    check_state_dtype(config.optimizer.state_dtype, precision)
    check_grad_comm_dtype(config.comm.grad_comm_dtype, precision, config.precision.reduce_dtype)
    check_compiler(config.compile)
    check_timeline(config.debug)
    groups = describe.describe_units(module, config, precision)
    check_blocks(groups[1:], config.activation_checkpointing)
    check_divided(module, [group.name for group in groups], config)
    check_compiled_blocks(groups[1:], config.compile)
    return groups


def recompute(
    module: nn.Module, units: Sequence[Unit], passes: Passes, config: ZeroConfig, *, pin_memory: bool
) -> list[Callable[[], None]]:
    """Have units compute their forwards again in the backward, in chunks or whole; returns what undoes it."""
    blocks = [(unit, module.get_submodule(unit.name)) for unit in units[1:]]
    offload = config.activation_checkpointing is Recompute.offload
    passes.vertical = vertical = Vertical(
        config.vertical_chunks, passes, module=module, offload_inputs=offload, pin_memory=pin_memory
    )
    if config.vertical_chunks == 1:
        return recompute_blocks(blocks, config.activation_checkpointing, passes, pin_memory=pin_memory)
    names = [unit.name for unit in units]
    whole, around = whole_batch_units(module, names, config), units_around(names)
    undo = [vertical.wrap(unit, block) for unit, block in blocks if unit.name not in whole]
    whole_blocks = [(unit, block) for unit, block in blocks if unit.name in whole - around]
    return undo + recompute_blocks(whole_blocks, config.activation_checkpointing, passes, pin_memory=pin_memory)


def register_hooks(
    module: nn.Module,
    units: Sequence[Unit],
    passes: Passes,
    config: ZeroConfig,
    precision: Precision,
    refuse: Callable[[str], None],
) -> None:
    """Register the hooks on modules.

    Args:
        refuse: raises where a call of the module would see placeholders.
    """
    hooks = passes.hooks
    for unit in units:
        hooks.watch_unit(unit, module.get_submodule(unit.name))
    if config.dynamic_graph:
        for name, inner in module.named_modules():
            if not name or any(unit.name.startswith(f"{name}.") for unit in units):
                hooks.watch_calls(inner)
    if precision in describe.AUTOCAST_DTYPES:
        for inner in describe.fp32_modules(module, config.precision.fp32_modules):
            hooks.keep_output_dtype(inner)
    owned = {id(info.param) for unit in units for info in unit.infos()}
    for inner in module.modules():
        if any(id(p) in owned for p in inner.parameters()):
            hooks.guard_module(inner, refuse)
    passes.watch_trainable()
