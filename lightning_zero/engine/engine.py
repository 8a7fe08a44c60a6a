"""The engine shards one module. Nothing in this file knows Lightning.

::

    hooks ---> passes ---> order        gathers, in one order on all ranks
                      ---> reducer      reduces gradients into shards
                      ---> sharded_grads  ``param.grad`` as users see it; grad_norms
                      ---> after_step   offloaded steps, and the gathers that follow steps
    optimizers ---> around_step ---> all of these
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from lightning_zero.comm.agreements import open_waits, together
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.share import Share, share_of_machine
from lightning_zero.config import (
    ConfigError,
    Offload,
    Precision,
    Recompute,
    ZeroConfig,
    check_accumulation,
    with_rows,
)
from lightning_zero.engine import build
from lightning_zero.engine.passes.access import Access, Fence, Writes
from lightning_zero.engine.passes.compiled import CompiledModules, from_settings
from lightning_zero.engine.passes.gather_order import GatherOrder
from lightning_zero.engine.passes.gradients import IssuedReductions, Reducer
from lightning_zero.engine.passes.hooks import ENGINE
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.steps.interception import AroundStep
from lightning_zero.engine.steps.optimizer import Stepper
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units import capacity, describe
from lightning_zero.engine.units.after_step import AfterStep, default_threads
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.build import BufferSync, build_units
from lightning_zero.engine.units.describe import agree_on_model, agree_on_sources
from lightning_zero.engine.units.home import Tiers, opened
from lightning_zero.engine.units.param import disown, make_plain
from lightning_zero.engine.units.unit import Unit
from lightning_zero.engine.vertical.units import Vertical
from lightning_zero.engine.whole import shown, state_dicts
from lightning_zero.engine.whole.restage import Follow
from lightning_zero.engine.whole.restage import restage as restage_to
from lightning_zero.engine.whole.values import Hollow
from lightning_zero.optimizers.state_trees import Saved, State
from lightning_zero.planning.placement import TierRow
from lightning_zero.pretrained import sources_from
from lightning_zero.pretrained.conversions import forget
from lightning_zero.ranks.progress import LongWork
from lightning_zero.timeline.record import Timeline

# Weak references: the module owns its engine, and an engine may lead to its module (through a hook of an optimizer,
# say). Strong ones would keep such modules alive.
LIVE: weakref.WeakSet[Engine] = weakref.WeakSet()


def _close_tiers(tiers: Tiers, pid: int) -> None:
    # In a forked child the finalizer would remove the parent's files and locks.
    if os.getpid() == pid:
        tiers.close()


def _instances() -> set[int]:
    """Return the numbers of the file tiers that engines of this process use."""
    return {engine.tiers.nvme.instance for engine in LIVE if engine.tiers.nvme is not None}


def engine_of(module: nn.Module) -> Engine | None:
    """Return the engine whose root is ``module``, or None."""
    return next((engine for engine in engines() if engine.shards(module)), None)


def engines() -> list[Engine]:
    return list(LIVE)


class Engine:
    """ZeRO for one module over one process group. ``units`` begins with the root and follows ``named_modules``."""

    # A whole module holds its engine; a copy or pickle of the module must be a plain module.
    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

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
        make_stepper: Callable[[Engine, Optimizer], Stepper],
        has_values: bool = False,
        long_work: LongWork | None = None,
    ) -> None:
        self.config = config
        self._make_stepper = make_stepper
        self.precision = config.precision.name or Precision.fp32
        self._module = weakref.ref(module)
        self._group = group
        self.tiers = Tiers()
        self._closing: weakref.finalize[..., object] | None = None
        self.host_copy: shown.HostCopy | None = None  # the whole module between runs
        first = group is None or dist.get_rank(group) == 0
        self.long_work = long_work if long_work is not None else LongWork(first and config.summary)
        share = self._shard(module, group, device, node, sources, has_values)
        self._places = {id(info.param): Place(b, info) for u in self.units for b in u.buckets for info in b.params}
        self.optimizers: list[Stepper] = []
        self._put_together(share)
        offload, pin_memory = config.activation_checkpointing is Recompute.offload, self.comm.streams.are_there
        self.vertical = Vertical(
            config.vertical_chunks, module, self.passes, offload_inputs=offload, pin_memory=pin_memory
        )
        self.compiled = CompiledModules(
            module,
            build.replace_forwards(module, self.units, self.passes, self.vertical, config, pin_memory),
            from_settings(config.compile),
            lambda function, name: describe.refuse_cuda_graph(function, name, self.config),
        )
        self._buffer_sync = BufferSync(module, self.comm)
        build.register_hooks(module, self.units, self.passes, config, self.precision, self._fence.refuse)
        for unit in self.units:
            unit.before_drop = self.writes.take_over
        # Last, so that nobody finds an engine whose construction raised.
        LIVE.add(self)
        module.__dict__[ENGINE] = self

    def _shard(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        node: str,
        sources: Mapping[str, Tensor] | None,
        has_values: bool,
    ) -> Share:
        """Check the settings, then make the units. Return this rank's share of its machine. Collective."""
        config = self.config
        waits = open_waits(group, device, config.stall_timeout_s)
        try:
            groups = together(
                group,
                waits,
                "sharding a module",
                partial(build.describe_checked, module, config, self.precision, group),
            )
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
            # The module may be sharded again: free files, locks and threads, and restore the parameters' classes.
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
            dynamic=config.dynamic_graph,
        )
        self.reducer = Reducer(self.buckets, self.comm, issued, config.reduce_bucket_bytes)
        self.after_step = AfterStep(
            self.units, self.comm.streams, config.offload.threads or default_threads(share.cpus)
        )
        self.writes = Writes(self.buckets, self.comm)
        self.passes = passes = Passes(
            self.units,
            self.comm,
            order=self.order,
            reducer=self.reducer,
            after_step=self.after_step,
            writes=self.writes,
            precision=self.precision,
        )
        self.sharded_grads = passes.sharded_grads
        self.timeline = Timeline(config.debug, self.comm, self.settle)
        self.around_step = AroundStep(
            self.units,
            self.place_of,
            passes=passes,
            reducer=self.reducer,
            writes=self.writes,
            after_step=self.after_step,
            stepped=self.timeline.stepped,
        )
        self._fence = Fence(self.buckets, in_pass=lambda: passes.key is not None)
        self._access = Access(
            self.units,
            self._places,
            passes=passes,
            after_step=self.after_step,
            writes=self.writes,
            fence=self._fence,
        )

    def _make_tiers(self, groups: Sequence[describe.UnitGroup], share: Share) -> list[TierRow]:
        tiers, rows = capacity.make_tiers(groups, self.config, self.comm, _instances(), share)
        self.take_tiers(tiers)
        return rows

    def take_tiers(self, tiers: Tiers) -> Callable[[], object]:
        """Use ``tiers``, and close them with the engine. Return a function that leaves the previous ones open."""
        before, self.tiers = self._closing, tiers
        # The finalizer also runs when the process ends. It must not hold the engine, which it would keep alive.
        self._closing = weakref.finalize(self, _close_tiers, tiers, os.getpid())
        return before.detach if before is not None else lambda: None

    def close_tiers(self) -> None:
        """Close the tiers when the process that made them ends. The engine cannot be used afterwards."""
        if self._closing is not None:
            self._closing()

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the module that was sharded is gone: keep a reference to it"
        return module

    def shards(self, module: nn.Module) -> bool:
        return self._module() is module

    @property
    def buckets(self) -> list[Bucket]:
        return [b for u in self.units for b in u.buckets]

    @property
    def shown(self) -> list[Bucket]:
        """Return the buckets that a ``gather()`` shows now."""
        return [bucket for bucket in self.buckets if bucket.is_plain]

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    def place_of(self, param: nn.Parameter) -> Place:
        """Return the bucket and slot of ``param``. Raise a ConfigError if it is not in the sharded module."""
        place = self._places.get(id(param))
        if place is None:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is not part of the sharded module, so ranks would step it "
                "apart. Register it on the module before it is sharded (in __init__ or configure_model)."
            )
        return place

    def owns(self, param: nn.Parameter) -> bool:
        return id(param) in self._places

    def placeholders_allowed(self) -> contextlib.AbstractContextManager[None]:
        """Let state dict calls of the module see placeholders. The caller replaces them by values."""
        return self._fence.lowered()

    @outside_autograd
    def settle(self) -> None:
        """Wait for steps and the gathers that follow them, so that masters can be read and changed. Collective.

        After an exception ranks first agree on whether their groups can still be used.
        """
        self.passes.recover()
        self.after_step.settle()

    def settle_gradients(self) -> None:
        """Apply users' pending changes of gradients, such as clearing them."""
        self.sharded_grads.settle()

    @outside_autograd
    def masters_changed(self, changed: set[Bucket] | None = None) -> None:
        """Update compute parameters after masters have changed in buckets ``changed``, already pushed. Collective.

        None: push and update all buckets.
        """
        if changed is None:
            changed = set(self.buckets)
            for bucket in self.long_work.items(self.buckets, "parameters from masters, in buckets"):
                with opened(bucket.home):
                    bucket.push()
        self.around_step.masters_changed(changed)

    @outside_autograd
    def sync_buffers(self) -> None:
        """Send rank 0's buffers to all ranks if buffers of any rank have changed since the last call. Collective."""
        self._buffer_sync.sync(self.module)

    @outside_autograd
    def release(self) -> None:
        """Undo the sharding: full plain parameters on the engine's device, no hooks, no groups. Collective.

        Raises RuntimeError if ranks have written different values to parameters since the last backward.
        """
        shown.hide_whole(self, keep=False)
        self.timeline.close()
        # Writes before an exception may differ between ranks.
        confirms = not self.passes.aborted
        self.abort()
        self.passes.recover("engine.release(), which all ranks must call")
        self.settle()
        self.writes.take_all_over()
        if confirms:
            self.writes.confirm_if_any()
        self.passes.hooks.remove()
        self.compiled.undo()
        for bucket in self.buckets:
            full = bucket.full_master()
            bucket.show_plain(bucket.part_of(full, info) for info in bucket.params)
            for info in bucket.params:
                # Copy: a view would keep the whole bucket in memory, and torch.save would write all of it.
                info.param.data = info.param.data.to(info.dtype, copy=True)
                info.param.grad = None
        disown(info.param for unit in self.units for info in unit.infos())
        for optimizer in self.optimizers:
            optimizer.release()
        self.after_step.close()
        self.tiers.close()
        self.comm.close()
        self.module.__dict__.pop(ENGINE, None)
        LIVE.discard(self)

    def restage(self, stage: object = None, offload: object = None, *, follow: Sequence[Follow] = ()) -> None:
        """Change the row of ``zero/stage``, of ``zero/offload``, or both, between two steps. Collective.

        All values move from shard to shard, a bucket at a time. Optimizers stay the same objects, and the groups of
        ranks that share shards stay the same.

        Args:
            stage: a row's name or the stage's number; None: unchanged.
            offload: a row's name, or all settings of the group. A name keeps the other settings of the group.
            follow: called for each bucket before it moves.

        Raises ConfigError on all ranks, before any change, if rows do not fit or ranks differ, or inside a step.
        If moving values fails, every later use of the engine raises.
        """
        config = self.comm.together("restaging: its rows", lambda: with_rows(self.config, stage, offload))
        with shown.set_aside(self):
            restage_to(self, config, follow, _instances())

    # -- the module whole between runs (whole/shown.py) ---------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Return whether parameters are plain whole tensors on the host, between runs."""
        return self.host_copy is not None and self.host_copy.is_shown

    # -- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(
        self, *, only_rank_0: bool = True, hollow: Hollow | None = None, trainable_only: bool = False
    ) -> State:
        """Return ``module.state_dict()`` with full values on the host; by default empty except on rank 0. Collective.

        The module's own ``state_dict`` makes the dict, overrides included. Tied parameters share one tensor.
        ``trainable_only`` leaves out frozen parameters. With ``hollow`` tensors have no values (``whole/values.py``).
        """
        return state_dicts.module_state(self, only_rank_0=only_rank_0, hollow=hollow, trainable_only=trainable_only)

    def load_state_dict(self, state: Saved, *, strict: bool = True) -> _IncompatibleKeys:
        """Load a full ``state``, the same on all ranks, into the shards. Collective."""
        with shown.set_aside(self):
            return state_dicts.load_module(self, state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, only_rank_0: bool = True, hollow: Hollow | None = None) -> State:
        """Return the optimizer's full ``state_dict()`` on the host; by default empty except on rank 0. Collective.

        With ``hollow`` tensors have no values. Raises ConfigError if ``optimizer`` does not step this engine's shards.
        """
        return state_dicts.optimizer_state(self, optimizer, only_rank_0=only_rank_0, hollow=hollow)

    def load_optimizer_state(self, optimizer: Optimizer, state: Saved) -> None:
        """Load a full optimizer ``state_dict()`` into the shards. Raise a ConfigError if groups differ. Collective."""
        state_dicts.load_optimizer(self, optimizer, state)

    # -- passes (passes/passes.py): callers mark steps and backwards ---------------------------------------------------

    def step_scope(self, key: str = "step", *, evaluation: bool = False) -> contextlib.AbstractContextManager[None]:
        """Enter a step, in which modules and root parameters can be used. Collective.

        With ``evaluation`` the pass ends with the scope, otherwise with the next backward.
        """
        if self.is_whole:
            return self._scope_between_runs(key, evaluation)
        return self.passes.scope(key, evaluation=evaluation)

    @contextlib.contextmanager
    def _scope_between_runs(self, key: str, evaluation: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if evaluation:
                stack.enter_context(shown.set_aside(self))
            else:
                shown.hide_whole(self)  # a backward follows the scope
            stack.enter_context(self.passes.scope(key, evaluation=evaluation))
            yield

    def backward_scope(self) -> contextlib.AbstractContextManager[None]:
        """Mark a backward. At its end all buckets are reduced. Collective."""
        return self.passes.backward_scope()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward()`` inside :meth:`backward_scope`. Collective."""
        with self.backward_scope():
            loss.backward(**kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients unreduced, at stages 0 and 1. Raise a ConfigError under ``grad_comm_dtype=bf16``."""
        check_accumulation(self.config)
        return self.reducer.no_sync()

    def abort(self) -> None:
        """Reset every unit after an exception. Starts no collective; waits a bounded time for those in flight."""
        self.passes.abort()

    def rest(self) -> None:
        """End the open pass, and wait for steps and gathers in flight, when a run ends. Collective."""
        self.passes.leave()
        whole = not self.after_step.has_failed  # if a step has failed, its error was raised before
        if whole:
            self.after_step.settle()  # not self.settle(): after an exception other ranks may be gone
        self.timeline.run_ends(together=whole and not self.passes.aborted)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Optimizer) -> Stepper:
        """Step shards by ``optimizer``. Raise a ConfigError if it cannot, or has other parameters. Collective."""
        make = partial(self._make_stepper, self, optimizer)
        sharded = self.comm.together("adding an optimizer", make, undo=Stepper.release, patient=True)
        capacity.check_state_fits(self.comm, self.tiers, sharded.state_to_come, self.config.offload)
        self.optimizers.append(sharded)
        return sharded

    def drop_optimizers(self) -> None:
        for optimizer in self.optimizers:
            optimizer.release()
        self.optimizers = []
