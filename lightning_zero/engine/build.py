"""Build parts of an engine: checks, and hooks and wrappers of modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
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
from lightning_zero.engine.passes.compiled import check_compiled, check_compiler
from lightning_zero.engine.passes.hooks import ENGINE
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.recompute import Recomputation, UnitForward, check_blocks
from lightning_zero.engine.units import describe
from lightning_zero.engine.units.unit import Unit
from lightning_zero.engine.vertical.units import (
    UnitInChunks,
    Vertical,
    check_divided,
    units_around,
    whole_batch_units,
)
from lightning_zero.timeline.record import check_timeline


def describe_checked(
    module: nn.Module, config: ZeroConfig, precision: Precision, group: dist.ProcessGroup | None
) -> list[describe.UnitGroup]:
    """Check settings and module, and describe the units. Sends no message, as one rank alone may raise."""
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
    check_blocks(groups[1:], config)
    check_divided(module, [group.name for group in groups], config)
    check_compiled(module, [group.name for group in groups])
    return groups


def replace_forwards(
    module: nn.Module, units: Sequence[Unit], passes: Passes, vertical: Vertical, config: ZeroConfig, pin_memory: bool
) -> dict[str, UnitForward]:
    """Wrap forwards of units that recompute in the backward or run in chunks, if the settings ask for it."""
    names = [unit.name for unit in units]
    in_chunks, around = set[str](), set[str]()
    if config.vertical_chunks > 1:
        in_chunks, around = set(names) - whole_batch_units(module, names, config), units_around(names)
    offload = config.activation_checkpointing is Recompute.offload
    forwards: dict[str, UnitForward] = {}
    for unit in units:
        block = module.get_submodule(unit.name)
        forwards[unit.name] = forward = UnitForward(unit, block, passes.hooks)
        if unit.name in in_chunks:
            forward.put_around(UnitInChunks(unit, block, vertical, passes))
        elif unit.name and unit.name not in around and config.activation_checkpointing is not Recompute.none:
            forward.put_around(Recomputation(block, passes, offload_inputs=offload, pin_memory=pin_memory))
    return forwards


def register_hooks(
    module: nn.Module,
    units: Sequence[Unit],
    passes: Passes,
    config: ZeroConfig,
    precision: Precision,
    refuse: Callable[[str], None],
) -> None:
    """Register the hooks on modules. ``refuse`` raises if a call of the module would see placeholders."""
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
