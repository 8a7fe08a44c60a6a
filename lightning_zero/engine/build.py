"""Make the parts of an engine: check a module, shard it, register hooks on it and replace its units' forwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.optim import Optimizer

from lightning_zero.comm.agreements import open_waits, together
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.share import Share, share_of_machine
from lightning_zero.engine.host_copy import HostCopy
from lightning_zero.engine.passes.access import Access
from lightning_zero.engine.passes.compiled import CompiledModules, check_compiled, check_compiler, compile_with
from lightning_zero.engine.passes.hooks import ENGINE, Hooks
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.recompute import Context, InputsOnHost, Recomputation, UnitForward, check_blocks
from lightning_zero.engine.steps.interception import AroundStep
from lightning_zero.engine.steps.optimizer import Stepper
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units import capacity, describe
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.build import build_units
from lightning_zero.engine.units.describe import agree_on_model, agree_on_sources
from lightning_zero.engine.units.master_storage import Tiers
from lightning_zero.engine.units.param import make_plain
from lightning_zero.engine.units.unit import Unit, Units
from lightning_zero.pretrained import sources_from
from lightning_zero.pretrained.conversions import forget
from lightning_zero.ranks.progress import LongWork
from lightning_zero.settings import (
    Compile,
    ConfigError,
    Offload,
    Precision,
    Recompute,
    ZeroConfig,
    check_rounding,
    check_state_dtype,
    make_folder,
)

# Weak references: the module owns its engine, and an engine may lead to its module (through a hook of an optimizer,
# say). Strong ones would keep such modules alive.
LIVE: weakref.WeakSet[Core] = weakref.WeakSet()


def instances() -> set[int]:
    """Return the numbers that this process's engines use in file names of offloaded shards."""
    return {engine.tiers.nvme.instance for engine in LIVE if engine.tiers.nvme is not None}


def describe_checked(module: nn.Module, config: ZeroConfig, *, is_sharded: bool) -> list[describe.UnitGroup]:
    """Check ``config`` and ``module``. Return a description of each unit, the root first. Raises ConfigError if a check
    fails or the module is sharded already. Sends no message, so the caller must report an error to other ranks."""
    precision = config.precision.name or Precision.fp32
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


def replace_forwards(module: nn.Module, units: Sequence[Unit], hooks: Hooks, config: ZeroConfig) -> CompiledModules:
    """Replace the forwards of ``units`` by forwards that recompute activations or are compiled, as ``config`` says.
    Return the object that tracks compiled modules."""
    passes = hooks.passes
    keeping: Context = nullcontext
    if config.activation_checkpointing is Recompute.offload:
        streams = passes.comm.streams
        keeping = InputsOnHost(streams) if streams.are_there else save_on_cpu
    forwards: dict[str, UnitForward] = {}
    for unit in units:
        block = module.get_submodule(unit.name)
        forwards[unit.name] = forward = UnitForward(unit, block, hooks)
        if unit.name and describe.recomputes(block, config):
            forward.put_around(Recomputation(block, passes, keeping))

    def refuse(function: Callable[..., object], name: str) -> None:
        describe.refuse_cuda_graph(function, name, passes.config)

    blocks = None if config.compile.name is Compile.none else compile_with(**config.compile.arguments)
    return CompiledModules(module, forwards, blocks, refuse)


def register_hooks(module: nn.Module, units: Sequence[Unit], hooks: Hooks, config: ZeroConfig) -> None:
    """Register hooks that gather and drop ``units``, cast outputs of fp32 modules, and refuse reads of placeholders."""
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
            hooks.guard_module(inner, hooks.passes.fence.refuse)
    hooks.watch_trainable()


class Core:
    """The base class of :class:`Engine`. Makes the engine's parts. Functions in ``whole/`` take a ``Core`` as argument.

    Attributes:
        config: the settings, with the stage and offload of the last :meth:`Engine.restage`.
        optimizers: one stepper for each optimizer, in the order in which :meth:`Engine.add_optimizer` was called.
        host_copy: a copy of all parameters on the host, which users see between two Trainer runs, or None.
    """

    @outside_autograd
    def __init__(
        self,
        module: nn.Module,
        config: ZeroConfig,
        group: dist.ProcessGroup | None,
        device: torch.device,
        node: str,
        sources: Mapping[str, Tensor] | None = None,
        *,
        make_stepper: Callable[[Core, AroundStep, Optimizer], Stepper],
        has_values: bool = False,
        long_work: LongWork | None = None,
    ) -> None:
        self.config = config
        self._make_stepper = make_stepper
        self._module = weakref.ref(module)
        self._group = group
        self._closing: weakref.finalize[..., object] | None = None
        self.tiers = Tiers()
        self.host_copy: HostCopy | None = None
        waits = open_waits(group, device, config.stall_timeout_s)
        long_work = long_work or LongWork(waits.rank == 0)
        try:
            is_sharded = any(engine._module() is module for engine in LIVE)
            check = partial(describe_checked, module, config, is_sharded=is_sharded)
            groups = together(group, waits, "sharding a module", check)
            agree_on_model(groups, group, waits)
            sources = dict(sources or {})
            if config.init_from is not None and device.type != "meta":
                find = partial(sources_from, config.init_from, module, warn=waits.rank == 0, only_meta=has_values)
                sources = {**together(group, waits, "finding first values", find), **sources}
            agree_on_sources(sources, group, waits)
            ranks = capacity.find_ranks(groups, config, group, device, node, waits)
            self.comm = Communicator(group, device, ranks=ranks, waits=waits, long_work=long_work)
            share = share_of_machine(self.comm) if config.offload.name is not Offload.none else Share()
            self.tiers, plans = capacity.make_tiers(groups, config, self.comm, instances(), share)
            self.units = Units(build_units(module, groups, config, self.comm, plans, self.tiers, sources))
            self.units.connect()
            forget()
        except BaseException:
            # The module may be sharded again: free files, locks and threads, and restore the parameters' classes.
            self.tiers.close()
            waits.close()
            make_plain(module.parameters())
            raise
        self.optimizers: list[Stepper] = []
        self.passes = Passes(module, self.units, self.comm, config, share.cpus)
        self.hooks = self.passes.hooks = Hooks(self.passes)
        self.passes.steppers = self.optimizers
        self._around_step = AroundStep(self.units, self.passes, weakref.ref(self))  # type: ignore[arg-type]  # an Engine
        self._access = Access(self.units, self.passes)
        self.compiled = replace_forwards(module, self.units, self.hooks, config)
        register_hooks(module, self.units, self.hooks, config)
        for unit in self.units:
            unit.before_drop = partial(self.passes.writes.take_over, drops=True)
        self.passes.after_step.count_references()
        # Last, so that nobody finds an engine whose construction raised.
        LIVE.add(self)
        module.__dict__[ENGINE] = self

    @property
    def tiers(self) -> Tiers:
        return self._tiers

    @tiers.setter
    def tiers(self, tiers: Tiers) -> None:
        """Use ``tiers``, and close ``tiers`` when the engine is freed. The caller has to close the previous tiers."""
        if self._closing is not None:
            self._closing.detach()
        self._tiers = tiers
        # The finalizer also runs when the process ends. It must not hold the engine, which it would keep alive.
        self._closing = weakref.finalize(self, tiers.close)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the module that was sharded is gone: keep a reference to it"
        return module

    @property
    def buckets(self) -> list[Bucket]:
        return self.units.buckets
