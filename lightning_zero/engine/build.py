"""Check a module before it is sharded, then register the engine's hooks on it and replace its units' forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu

from lightning_zero.engine.passes.compiled import CompiledModules, check_compiled, check_compiler, compile_with
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.recompute import Context, InputsOnHost, Recomputation, UnitForward, check_blocks
from lightning_zero.engine.units import describe
from lightning_zero.engine.units.unit import Unit
from lightning_zero.settings import (
    Compile,
    ConfigError,
    Precision,
    Recompute,
    ZeroConfig,
    check_rounding,
    check_state_dtype,
    make_folder,
)


def describe_checked(
    module: nn.Module, config: ZeroConfig, precision: Precision, group: dist.ProcessGroup | None, is_sharded: bool
) -> list[describe.UnitGroup]:
    """Check settings and ``module``. Return a description of each of its units, the root first. Raises ConfigError on
    this rank alone, also if the module is sharded already. Sends no message: the caller must tell other ranks."""
    if is_sharded:
        raise ConfigError("this module is sharded already. Call engine.release() before it is sharded again.")
    check_rounding(config.precision.stochastic_rounding, precision)
    check_state_dtype(config.optimizer.state_dtype, precision)
    check_compiler(config.compile)
    make_folder("zero.timeline", config.timeline)
    groups = describe.describe_units(module, config, precision)
    check_blocks(groups[1:], config)
    check_compiled(module, [group.name for group in groups])
    return groups


def replace_forwards(module: nn.Module, units: Sequence[Unit], passes: Passes, config: ZeroConfig) -> CompiledModules:
    """Replace the forwards of ``units`` by ones that recompute activations or are compiled, as ``config`` asks."""
    keeping: Context = nullcontext
    if config.activation_checkpointing is Recompute.offload:
        streams = passes.comm.streams
        keeping = InputsOnHost(streams) if streams.are_there else save_on_cpu
    forwards: dict[str, UnitForward] = {}
    for unit in units:
        block = module.get_submodule(unit.name)
        forwards[unit.name] = forward = UnitForward(unit, block, passes.hooks)
        if unit.name and describe.recomputes(block, config):
            forward.put_around(Recomputation(block, passes, keeping))

    def refuse(function: Callable[..., object], name: str) -> None:
        describe.refuse_cuda_graph(function, name, passes.config)

    blocks = None if config.compile.name is Compile.none else compile_with(**config.compile.arguments)
    return CompiledModules(module, forwards, blocks, refuse)


def register_hooks(module: nn.Module, units: Sequence[Unit], passes: Passes, config: ZeroConfig) -> None:
    """Register hooks that gather and drop ``units``, cast outputs of fp32 modules, and refuse calls on placeholders."""
    hooks = passes.hooks
    for unit in units:
        hooks.watch_unit(unit, module.get_submodule(unit.name))
    if config.dynamic_graph:
        for name, inner in module.named_modules():
            if not name or any(unit.name.startswith(f"{name}.") for unit in units):
                hooks.watch_calls(inner)
    if config.precision.name in describe.AUTOCAST_DTYPES:
        for inner in describe.fp32_modules(module, config.precision.fp32_modules):
            hooks.keep_output_dtype(inner)
    owned = {id(info.param) for unit in units for info in unit.infos}
    for inner in module.modules():
        if any(id(p) in owned for p in inner.parameters()):
            hooks.guard_module(inner, passes.fence.refuse)
    passes.watch_trainable()
