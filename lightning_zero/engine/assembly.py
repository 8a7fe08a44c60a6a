"""Puts the parts of an engine together. They share the units and the ``Communicator``.

::

    hooks ---> passes ---> order        gathers, in one order on all ranks
                      ---> reducer      gradients, over the ranks into shards
                      ---> sentinels    what users see of gradients; grad_norms
                      ---> after_step   offloaded steps, and the gathers that follow steps
    optimizers ---> around_step ---> all of these
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.comm.agreements import open_waits, together
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.share import Share, share_of_machine
from lightning_zero.config import (
    ConfigError,
    Offload,
    Precision,
    Recompute,
    ZeroConfig,
    check_grad_wire,
    check_rounding,
    check_state_dtype,
)
from lightning_zero.engine.passes.access import Access, Fence, Writes
from lightning_zero.engine.passes.compiled import CompiledModules, check_compiled_blocks, check_compiler, from_settings
from lightning_zero.engine.passes.gather_order import GatherOrder
from lightning_zero.engine.passes.grad_changes import GradChanges
from lightning_zero.engine.passes.grad_norms import GradNorms
from lightning_zero.engine.passes.gradient_sentinels import Sentinels
from lightning_zero.engine.passes.gradients import IssuedReductions, Reducer
from lightning_zero.engine.passes.hooks import ENGINE
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.recompute import check_blocks, recompute_blocks
from lightning_zero.engine.steps.interception import AroundStep
from lightning_zero.engine.steps.optimizer import ShardedOptimizer
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units import capacity, describe
from lightning_zero.engine.units.after_step import AfterStep, default_threads
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.build import BufferSync, build_units
from lightning_zero.engine.units.describe import agree_on_model, agree_on_sources
from lightning_zero.engine.units.home import Tiers, opened
from lightning_zero.engine.units.param import make_plain
from lightning_zero.engine.units.unit import Unit
from lightning_zero.engine.vertical.coupled import check_divided, units_around, whole_batch_units
from lightning_zero.engine.vertical.units import Vertical
from lightning_zero.planning.placement import TierRow
from lightning_zero.pretrained import sources_from
from lightning_zero.pretrained.conversions import forget
from lightning_zero.ranks.progress import LongWork
from lightning_zero.timeline.record import Timeline, check_timeline

# Weakly: the module owns its engine, and both go together. A table that held engines would keep every module alive to
# which an engine leads, through a hook of an optimizer, say.
LIVE: weakref.WeakSet[Assembly] = weakref.WeakSet()


def _close_tiers(tiers: Tiers, pid: int) -> None:
    """Close the tiers of an engine that is gone, but not in a forked child, where only a copy of it is gone."""
    # A finalizer runs in a forked child too. There it would remove the parent's files and locks.
    if os.getpid() == pid:
        tiers.close()


class Assembly:
    """The parts of one engine, put together.

    Attributes:
        units: the root first, then in the order of ``named_modules``.
        comm: collectives, their counts and observers.
        optimizers: the optimizers that step this engine's shards.
        long_work: shows on one rank what takes long.
    """

    @outside_autograd
    def __init__(
        self,
        module: nn.Module,
        config: ZeroConfig,
        group: Any,
        device: torch.device,
        node: str,
        sources: Mapping[str, Tensor] | None = None,
        *,
        has_values: bool = False,
        long_work: LongWork | None = None,
    ) -> None:
        self.config = config
        self.precision = config.precision.name or Precision.fp32
        self._module = weakref.ref(module)
        self._group = group
        self.tiers = Tiers()
        self._closing: Any = None  # what closes the tiers
        self.host_copy: Any = None  # of whole/host_copy.py
        first = group is None or dist.get_rank(group) == 0
        self.long_work = long_work if long_work is not None else LongWork(first and config.summary)
        share = self._shard(module, group, device, node, sources, has_values)
        self._places = {id(info.param): Place(b, info) for u in self.units for b in u.buckets for info in b.params}
        self.optimizers: list[ShardedOptimizer] = []
        self._put_together(share)
        self._compiled = CompiledModules(
            module,
            [unit.name for unit in self.units],
            from_settings(config.compile),
            lambda function, name: describe.refuse_cuda_graph(function, name, self.config),
        )
        self._undo = self._recompute(module)
        self._undo.append(self._compiled.undo)
        self._buffer_sync = BufferSync(module, self.comm)
        self._register_hooks(module)
        for unit in self.units:
            unit.before_drop = self.writes.take_over
        # Last: an engine whose construction raises is found nowhere.
        LIVE.add(self)
        module.__dict__[ENGINE] = self

    def _recompute(self, module: nn.Module) -> list[Callable[[], None]]:
        """Have units compute their forwards again in the backward, in chunks or whole; returns what undoes it."""
        config, pin_memory = self.config, self.comm.streams.are_there
        blocks = [(unit, module.get_submodule(unit.name)) for unit in self.units[1:]]
        offload = config.activation_checkpointing is Recompute.offload
        self.passes.vertical = vertical = Vertical(
            config.micro_batches, self.passes, module=module, offload_inputs=offload, pin_memory=pin_memory
        )
        if config.micro_batches == 1:
            return recompute_blocks(blocks, config.activation_checkpointing, self.passes, pin_memory=pin_memory)
        names = [unit.name for unit in self.units]
        whole, around = whole_batch_units(module, names, config), units_around(names)
        undo = [vertical.wrap(unit, block) for unit, block in blocks if unit.name not in whole]
        whole_blocks = [(unit, block) for unit, block in blocks if unit.name in whole - around]
        return undo + recompute_blocks(
            whole_blocks, config.activation_checkpointing, self.passes, pin_memory=pin_memory
        )

    def _shard(
        self,
        module: nn.Module,
        group: Any,
        device: torch.device,
        node: str,
        sources: Mapping[str, Tensor] | None,
        has_values: bool,
    ) -> Share:
        """Check everything that can be refused, then make the units. Returns this rank's share of its machine."""
        config = self.config
        waits = open_waits(group, device, config.stall_timeout_s)
        try:
            groups = together(group, waits, "sharding a module", lambda: self._describe(module))
            agree_on_model(groups, group, waits)
            if config.init_from is not None and device.type != "meta":
                warn = group is None or dist.get_rank(group) == 0
                find = partial(sources_from, config.init_from, module, warn=warn, only_meta=has_values)
                sources = {**together(group, waits, "finding first values", find), **(sources or {})}
            agree_on_sources(sources or {}, group, waits)
            topology = capacity.find_topology(groups, config, group, device, node, waits)
            self.comm = Communicator(
                group,
                device,
                transport=config.comm.transport,
                topology=topology,
                waits=waits,
                even_alone=config.comm.even_alone,
            )
            share = share_of_machine(self.comm) if config.offload.name is not Offload.none else Share()
            rows = self._make_tiers(groups, share)
            self.units: list[Unit] = build_units(
                module, groups, config, self.comm, rows, self.tiers, sources, self.long_work
            )
            self.comm.connect([bucket.sends for bucket in unit.buckets] for unit in self.units)
            forget()
        except BaseException:
            # The module may be sharded again: files and locks, threads and classes of a half-made engine must be gone.
            self.tiers.close()
            waits.close()
            make_plain(module.parameters())
            raise
        return share

    def _put_together(self, share: Share) -> None:
        config = self.config
        issued = IssuedReductions()
        self.order = GatherOrder(
            self.units,
            self.comm,
            issued,
            prefetch_bytes=config.prefetch_bytes,
            keep_bytes=config.keep_gathered_bytes,
            dynamic=config.dynamic,
        )
        self.reducer = Reducer(self.buckets, self.comm, issued, config.reduce_bucket_bytes)
        self.grad_norms = GradNorms(self.reducer, self.comm)
        self.sentinels = sentinels = Sentinels(self.reducer.grads, self.grad_norms, GradChanges(self.reducer))
        self.after_step = after_step = AfterStep(
            self.units, self.comm.streams, config.offload.threads or default_threads(share.cpus)
        )
        self.writes = Writes(self.buckets, self.comm)
        self.passes = passes = Passes(
            self.units,
            self.comm,
            order=self.order,
            reducer=self.reducer,
            sentinels=self.sentinels,
            after_step=self.after_step,
            writes=self.writes,
            precision=self.precision,
        )

        def settle_gradients() -> None:
            passes.forget_failed()
            after_step.wait_for_steps()
            sentinels.forget_zeroed()

        self._settle_gradients = self.grad_norms.settle = settle_gradients
        self.around_step = AroundStep(
            self.units,
            self.place_of,
            passes=passes,
            reducer=self.reducer,
            sentinels=self.sentinels,
            writes=self.writes,
            after_step=self.after_step,
        )
        self.timeline = Timeline(config.debug, self.comm, self.settle)
        self.around_step.stepped = self.timeline.stepped
        self._fence = Fence(self.buckets, in_pass=lambda: passes.key is not None)
        self._access = Access(
            self.units,
            self._places,
            passes=passes,
            after_step=self.after_step,
            writes=self.writes,
            fence=self._fence,
        )

    def _describe(self, module: nn.Module) -> list[describe.UnitGroup]:
        """Describe the units of ``module``, after the checks that may refuse it on one rank alone. Sends no message."""
        found = module.__dict__.get(ENGINE)
        if found is not None and found.shards(module):
            raise ConfigError("this module is sharded already. Call engine.release() before it is sharded again.")
        if self.config.comm.even_alone and self._group is None:
            raise ConfigError(
                "zero.comm.even_alone: expected a process group to send messages over, got none. Call "
                "torch.distributed.init_process_group first, or set zero.comm.even_alone=false."
            )
        check_rounding(self.config.precision.stochastic_rounding, self.precision)
        check_state_dtype(self.config.optimizer.state_dtype, self.precision)
        check_grad_wire(self.config.comm.grad_wire, self.precision, self.config.precision.reduce_dtype)
        check_compiler(self.config.compile)
        check_timeline(self.config.debug)
        groups = describe.describe_units(module, self.config, self.precision)
        check_blocks(groups[1:], self.config.activation_checkpointing)
        check_divided(module, [group.name for group in groups], self.config)
        check_compiled_blocks(groups[1:], self.config.compile)
        return groups

    def _make_tiers(self, groups: Sequence[describe.UnitGroup], share: Share) -> list[TierRow]:
        """Each unit's row of tiers."""
        taken = {other.tiers.nvme.instance for other in LIVE if other.tiers.nvme is not None}
        tiers, rows = capacity.make_tiers(groups, self.config, self.comm, taken, share)
        self.take_tiers(tiers)
        return rows

    def take_tiers(self, tiers: Tiers) -> Callable[[], object]:
        """Have ``tiers``, and close them when the engine is gone. Those of before are closed then too, unless what this
        returns is called."""
        before, self.tiers = self._closing, tiers
        # Also at the end of the process. It is given the tiers and not the engine, which it would keep alive.
        self._closing = weakref.finalize(self, _close_tiers, tiers, os.getpid())
        return before.detach if before is not None else lambda: None

    def close_tiers(self) -> None:
        """Close the tiers at the end of the process that has made them; nothing can be asked of the engine then."""
        if self._closing is not None:
            self._closing()

    @property
    def is_compiled(self) -> bool:
        """Whether ``torch.compile`` has a part in what the module computes."""
        return self._compiled.are_there

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the module that was sharded is gone: keep a reference to it"
        return module

    def shards(self, module: nn.Module) -> bool:
        """Whether ``module`` is the one that this engine shards."""
        return self._module() is module

    @property
    def buckets(self) -> list[Bucket]:
        return [b for u in self.units for b in u.buckets]

    @property
    def shown(self) -> list[Bucket]:
        """The buckets that are inside a ``gather()``."""
        return [bucket for bucket in self.buckets if bucket.is_plain]

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    def place_of(self, param: nn.Parameter) -> Place:
        """Where a parameter lives.

        Raises:
            ConfigError: it is not a parameter of the sharded module.
        """
        place = self._places.get(id(param))
        if place is None:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is not part of the sharded module, so ranks would step it "
                "apart. Register it on the module before it is sharded (in __init__ or configure_model)."
            )
        return place

    def owns(self, param: nn.Parameter) -> bool:
        return id(param) in self._places

    def _register_hooks(self, module: nn.Module) -> None:
        hooks = self.passes.hooks
        for unit in self.units:
            hooks.watch_unit(unit, module.get_submodule(unit.name))
        if self.config.dynamic:
            for name, inner in module.named_modules():
                if not name or any(unit.name.startswith(f"{name}.") for unit in self.units):
                    hooks.watch_calls(inner)
        if self.precision in describe.AUTOCAST_DTYPES:
            for inner in describe.fp32_modules(module, self.config.precision.fp32_modules):
                hooks.keep_output_dtype(inner)
        for inner in module.modules():
            if any(self.owns(p) for p in inner.parameters()):
                hooks.guard_module(inner, self._fence.refuse)
        self.passes.watch_trainable()

    def placeholders_allowed(self) -> contextlib.AbstractContextManager[None]:
        """Allow state dict calls of the module to see placeholders, for callers that put values in their place."""
        return self._fence.lowered()

    @outside_autograd
    def settle(self) -> None:
        """Wait for steps and the gathers that follow them: masters may be read and changed from here on.

        On all ranks: after an exception they first agree on whether their groups can still be used.
        """
        self.passes.recover()
        self.after_step.settle()

    def forget_zeroed(self) -> None:
        """Drop the gradients that the user has cleared, and zero those zeroed, since the last backward."""
        self._settle_gradients()

    def check_reduced(self, params: Iterable[nn.Parameter]) -> None:
        """Raise, on all ranks, where gradients of ``params`` wait for a backward that reduces them.

        Raises:
            RuntimeError: all backwards were run inside ``no_sync``.
        """
        self.reducer.refuse_unreduced(map(self.place_of, params))

    @outside_autograd
    def masters_changed(self, changed: set[Bucket] | None = None) -> None:
        """Follow new masters of ``changed`` buckets. On all ranks. See :meth:`AroundStep.masters_changed`.

        Args:
            changed: default: all; then this rank's own compute parameters are brought up to date here too.
        """
        if changed is None:
            changed = set(self.buckets)
            for bucket in self.long_work.items(self.buckets, "parameters from masters, in buckets"):
                with opened(bucket.home):
                    bucket.push()
        self.around_step.masters_changed(changed)
