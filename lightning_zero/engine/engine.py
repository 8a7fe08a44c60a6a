"""The engine: one sharded module, what it consists of, and what may be asked of it. No Lightning here.

::

    hooks ---> passes ---> order        gathers, in one order on all ranks
                      ---> reducer      gradients, over the ranks into shards
                      ---> sentinels    what users see of gradients
                      ---> under_way    offloaded steps, and the gathers that follow steps
    optimizers (step, and early_steps in a backward) ---> under_way

The engine puts these together and keeps what they share: the units, and the ``Communicator``.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm.communicator import Communicator, open_waits, together
from lightning_zero.comm.share import Share, share_of_machine
from lightning_zero.config import ConfigError, Offload, Precision, ZeroConfig, check_rounding
from lightning_zero.engine.parameters.access import Access
from lightning_zero.engine.parameters.classes import disown, make_plain
from lightning_zero.engine.parameters.placeholders import Fence, make_placeholders
from lightning_zero.engine.parameters.writes import Writes
from lightning_zero.engine.passes.gather_order import GatherOrder
from lightning_zero.engine.passes.gradient_sentinels import Sentinels
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.passes.hooks import ENGINE
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.recompute import check_blocks, recompute_blocks
from lightning_zero.engine.steps.early_steps import EarlySteps
from lightning_zero.engine.steps.optimizer import ShardedOptimizer
from lightning_zero.engine.steps.pending import UnderWay
from lightning_zero.engine.steps.torch_optimizers import count_states
from lightning_zero.engine.steps.worker import default_threads
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units import build, capacity
from lightning_zero.engine.units.agreement import agree_on_model
from lightning_zero.engine.units.bucket import Bucket, Place, values_changed
from lightning_zero.engine.units.home import Tiers, opened
from lightning_zero.engine.units.module_buffers import BufferSync
from lightning_zero.engine.units.unit import Unit
from lightning_zero.planning.placement import ON_DEVICE

# The module owns its engine, so that both go together: a table that held engines would keep every module alive that an
# engine leads to, through a hook of an optimizer, say.
_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that shards ``module``, if ``module`` is the root of one."""
    return next((engine for engine in _ENGINES if engine.shards(module)), None)


def engines() -> list[Engine]:
    """All live engines of this process."""
    return list(_ENGINES)


def _close_tiers(tiers: Tiers, pid: int) -> None:
    """Files and locks go with their engine, but not with a forked child's copy of it."""
    if os.getpid() == pid:
        tiers.close()


class Engine:
    """ZeRO for one module over one process group.

    Attributes:
        units: the root first, then in the order of ``named_modules``.
        comm: collectives, their counts and observers.
        optimizers: the optimizers that step this engine's shards.
    """

    @outside_autograd
    def __init__(self, module: nn.Module, config: ZeroConfig, group: Any, device: torch.device, node: str) -> None:
        self.config = config
        self.precision = config.precision.name or Precision.fp32
        self._module = weakref.ref(module)
        self.tiers = Tiers(ON_DEVICE)
        waits = open_waits(group, device, config.stall_timeout_s)
        try:
            groups = together(group, waits, "sharding a module", lambda: self._describe(module))
            agree_on_model(groups, group, waits)
            topology = capacity.find_topology(groups, config, group, device, node, waits)
            transport = config.comm.transport
            self.comm = Communicator(group, device, transport=transport, topology=topology, waits=waits)
            share = share_of_machine(self.comm) if config.offload.name is not Offload.none else Share()
            tiers = self._make_tiers(groups, share)
            self.units: list[Unit] = build.build_units(module, groups, config, self.comm, tiers)
        except BaseException:
            self.tiers.close()
            waits.close()
            make_plain(module.parameters())
            raise
        self._places = {id(info.param): Place(b, info) for u in self.units for b in u.buckets for info in b.params}
        self.order = GatherOrder(
            self.units,
            self.comm,
            prefetch_bytes=config.prefetch_bytes,
            keep_bytes=config.keep_gathered_bytes,
            dynamic=config.dynamic,
        )
        self.reducer = Reducer(self.buckets, self.comm, config.reduce_bucket_bytes, dynamic=config.dynamic)
        self.sentinels = Sentinels(self.reducer.grads)
        self.under_way = UnderWay(self.units, self.comm.streams, config.offload.threads or default_threads(share.cpus))
        make_placeholders(self.buckets)
        self.writes = Writes(self.buckets, self.comm)
        self.passes = passes = Passes(
            self.units,
            self.comm,
            order=self.order,
            reducer=self.reducer,
            sentinels=self.sentinels,
            under_way=self.under_way,
            writes=self.writes,
            precision=self.precision,
        )
        self._early_steps = EarlySteps(passes, self.reducer, self.writes)
        self.optimizers: list[ShardedOptimizer] = []
        self.shown: set[Bucket] = set()  # buckets inside a gather()
        self._fence = Fence(self.buckets, self.shown, in_pass=lambda: passes.key is not None)
        self._access = Access(
            self.units,
            self._places,
            passes=passes,
            under_way=self.under_way,
            writes=self.writes,
            fence=self._fence,
        )
        self._undo = recompute_blocks(
            [(unit, module.get_submodule(unit.name)) for unit in self.units[1:]],
            config.activation_checkpointing,
            passes,
            pin_memory=device.type == "cuda",
        )
        self._buffer_sync = BufferSync(module, self.comm)
        self._register_hooks(module)
        for unit in self.units:
            unit.before_drop = self.writes.take_over
            unit.reshard()
        _ENGINES.add(self)
        module.__dict__[ENGINE] = self

    def _describe(self, module: nn.Module) -> list[build.UnitGroup]:
        """Units of ``module``, after what can be refused on one rank alone."""
        if engine_of(module) is not None:
            raise ConfigError("this module is sharded already. Call engine.release() before it is sharded again.")
        check_rounding(self.config.precision.stochastic_rounding, self.precision)
        groups = build.describe_units(module, self.config, self.precision)
        check_blocks(groups[1:], self.config.activation_checkpointing)
        return groups

    def _make_tiers(self, groups: Sequence[build.UnitGroup], share: Share) -> dict[str, Tiers]:
        """Each unit's row of tiers."""
        taken = {other.tiers.nvme.instance for other in engines() if other.tiers.nvme is not None}
        self.tiers, by_unit = capacity.make_tiers(groups, self.config, self.comm, taken, share)
        weakref.finalize(self, _close_tiers, self.tiers, os.getpid())  # also at the end of the process
        return by_unit

    # -- the model --------------------------------------------------------------------------------------------------

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
    def root(self) -> Unit:
        return self.units[0]

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
        if self.precision in (Precision.bf16, Precision.fp16):
            for inner in build.fp32_modules(module, self.config.precision.fp32_modules):
                hooks.keep_output_dtype(inner)
        for inner in module.modules():
            if any(self.owns(p) for p in inner.parameters()):
                hooks.guard_module(inner, self._fence.refuse)
        self.passes.watch_trainable()

    def placeholders_allowed(self) -> contextlib.AbstractContextManager[None]:
        """Inside, state dict calls of the module see placeholders, for callers that put values in their place."""
        return self._fence.lowered()

    @outside_autograd
    def sync_buffers(self) -> None:
        """On all ranks: rank 0's buffers, if they have changed on any rank since."""
        self._buffer_sync.sync(self.module)

    @outside_autograd
    def release(self) -> None:
        """Undo the sharding on all ranks: plain full parameters on the engine's device, no hooks, no groups.

        Raises:
            RuntimeError: ranks have written different values to parameters since the last backward.
        """
        agrees = not self.passes.aborted  # after an exception messages may be missing that an agreement would wait for
        self.abort()
        self.settle()
        self.writes.take_all_over()
        if agrees:
            self.writes.confirm_if_any()
        self.passes.hooks.remove()
        for undo in self._undo:
            undo()
        for bucket in self.buckets:
            bucket.show_plain(bucket.full_master())
            for info in bucket.params:
                info.param.data = info.param.data.to(info.dtype, copy=True)
                info.param.grad = None
        disown(info.param for unit in self.units for info in unit.infos())
        for optimizer in self.optimizers:
            optimizer.release()
        self.under_way.close()
        self.tiers.close()
        self.comm.close()
        self.module.__dict__.pop(ENGINE, None)
        _ENGINES.discard(self)

    # -- whole values (values.py builds on this class, so it is imported late) --------------------------------------

    def state_dict(self, *, only_rank_0: bool = True) -> dict[str, Any]:
        """On all ranks: the module's state dict with full values on the host; empty on other ranks by default."""
        from lightning_zero.engine.whole import values

        return values.module_state_dict(self, only_rank_0=only_rank_0)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """On all ranks, each with the same full ``state``: load it into the shards."""
        from lightning_zero.engine.whole import values

        return values.load_module_state_dict(self, state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, only_rank_0: bool = True) -> dict[str, Any]:
        """On all ranks: ``optimizer.state_dict()`` as without sharding; by default empty on other ranks than 0."""
        from lightning_zero.engine.whole import values

        return values.optimizer_state(self, optimizer, only_rank_0=only_rank_0)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """On all ranks, each with the same full ``state``: load it into the slices."""
        from lightning_zero.engine.whole import values

        values.load_optimizer_state(self, optimizer, state)

    # -- passes: the engine is told where steps and backwards are; see passes.py ------------------------------------

    @property
    def in_backward(self) -> bool:
        """A backward is running."""
        return self.passes.in_backward

    def step_scope(self, key: str = "step", *, evaluation: bool = False) -> contextlib.AbstractContextManager[None]:
        """A step: parameters may be used inside, in calls of modules and (those of the root unit) directly.

        All ranks enter it. With ``evaluation`` it ends the pass; otherwise a backward after it does.
        """
        return self.passes.scope(key, evaluation=evaluation)

    def backward_scope(self) -> contextlib.AbstractContextManager[None]:
        """Around a backward that all ranks run: at its end every bucket is reduced."""
        return self.passes.backward_scope()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward()`` inside :meth:`backward_scope`."""
        with self.backward_scope():
            loss.backward(**kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside accumulate without reducing, where gradients rest replicated (stages 0 and 1)."""
        return self.reducer.no_sync()

    def abort(self) -> None:
        """After an exception: every unit back to rest. Starts no collective, and waits a bounded time for others."""
        self.passes.abort()

    def rest(self) -> None:
        """Between runs: no pass is open and no gather in flight."""
        self.passes.leave()
        self.settle()

    @outside_autograd
    def settle(self) -> None:
        """Wait for the gathers that a step has issued: masters may be read and changed from here on."""
        self.under_way.settle()

    def wait_for_steps(self) -> None:
        """Wait for offloaded steps: until then they own the gradients that they were given."""
        self.under_way.wait_for_steps()

    # -- gradients between backward and step --------------------------------------------------------------------------

    def forget_zeroed(self) -> None:
        """Drop the gradients that the user has cleared, and zero those zeroed, since the last backward."""
        self.wait_for_steps()
        self.sentinels.forget_zeroed()

    def check_reduced(self, params: Iterable[nn.Parameter]) -> None:
        """Raise, on all ranks, where gradients of ``params`` wait for a backward that reduces them.

        Raises:
            RuntimeError: all backwards were run inside ``no_sync``.
        """
        self.reducer.refuse_unreduced(map(self.place_of, params))

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Optimizer) -> ShardedOptimizer:
        """Make ``optimizer`` step this engine's shards.

        Raises:
            ConfigError: it is not element-wise, or has parameters that are not ours; the same on all ranks.
        """
        make = partial(self._make_sharded, optimizer)
        sharded = self.comm.together("adding an optimizer", make, undo=ShardedOptimizer.release)
        capacity.check_state_fits(
            self.comm, self.tiers, sharded.buckets(), count_states(optimizer), self.config.offload
        )
        self.optimizers.append(sharded)
        return sharded

    def _make_sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        return ShardedOptimizer(
            optimizer,
            self.place_of,
            used=self.sentinels.used_params,
            landing=self._early_steps.landing,
            before=self._before_step,
            after=self._stepped,
            submit=self.under_way.submit,
            device_type=self.comm.device.type,
            declared_elementwise=self.config.optimizer.elementwise,
            stochastic_rounding=self.config.precision.stochastic_rounding,
        )

    def stepping_in_backward(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a step whose closure runs one backward may step a bucket as soon as its gradient has been reduced.

        The backward is the one that the engine is told of; a plain ``loss.backward()`` before it only accumulates. For
        callers who know that nothing looks at gradients or changes them in between: no clipping, no loss scaling,
        no hook of the user's. Only offloaded buckets are stepped so: the others have nothing to hide.
        """
        return self._early_steps.allowed()

    def drop_optimizers(self) -> None:
        for optimizer in self.optimizers:
            optimizer.release()
        self.optimizers = []

    def _before_step(self, params: Iterable[nn.Parameter], stepped: set[Bucket]) -> None:
        if self.shown:
            raise RuntimeError(
                "optimizer.step() inside gather(): what is written to the shown parameters would replace the step's "
                "result. Leave the `with lightning_zero.gather(...)` block first."
            )
        if stepped:  # inside the backward, which has waited for earlier steps; nobody could clear gradients since
            for unit in self.units:
                unit.unshard_wait()
        else:
            self.settle()
            self.forget_zeroed()
        self.writes.take_all_over()
        self.check_reduced(params)

    def _stepped(self, changed: set[Bucket], params: Sequence[nn.Parameter]) -> None:
        self.passes.stepped()
        values_changed(self.place_of(param).info for param in params)
        self.masters_changed(changed)

    @outside_autograd
    def masters_changed(self, changed: set[Bucket] | None = None) -> None:
        """On all ranks: the masters of ``changed`` buckets are new (default: all; then compute parameters follow here).

        Replicated compute parameters are brought up to date by gathers that the next forward waits for, unit by unit.
        """
        if changed is None:
            changed = set(self.buckets)
            for bucket in self.buckets:
                with opened(bucket.home):
                    bucket.push()
        self.under_way.masters_changed(changed)
        if self.passes.key is not None:
            self.under_way.refresh(self.root)
            self.root.unshard_wait()
