"""The engine: one sharded module, and its public methods. ``assembly.py`` shows its parts. No Lightning here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import Whole, check_accumulation, with_rows
from lightning_zero.engine.assembly import LIVE, Assembly
from lightning_zero.engine.passes.hooks import ENGINE
from lightning_zero.engine.passes.passes import Look
from lightning_zero.engine.steps.optimizer import ShardedOptimizer
from lightning_zero.engine.steps.whole_optimizer import WholeOptimizer
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units import capacity
from lightning_zero.engine.units.param import disown
from lightning_zero.engine.whole import host_copy, module_state, optimizer_state, ranges
from lightning_zero.engine.whole.ranges import Copies, Hollow, Range, Value
from lightning_zero.engine.whole.restage import Follow
from lightning_zero.engine.whole.restage import restage as restage_to
from lightning_zero.optimizers.refused import check_optimizer


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that shards ``module``, if ``module`` is the root of one."""
    return next((engine for engine in engines() if engine.shards(module)), None)


def engines() -> list[Engine]:
    """All live engines of this process."""
    return [cast(Engine, engine) for engine in LIVE]


class Engine(Assembly):
    """ZeRO for one module over one process group.

    Attributes:
        units: the root first, then in the order of ``named_modules``.
        comm: collectives, their counts and observers.
        optimizers: the optimizers that step this engine's shards.
    """

    # A module that is whole holds its engine, and a copy or a pickle of it is a plain module.
    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    # -- the model ----------------------------------------------------------------------------------------------------

    @outside_autograd
    def sync_buffers(self) -> None:
        """Send rank 0's buffers to all ranks, if they have changed on any rank since. On all ranks."""
        self._buffer_sync.sync(self.module)

    @outside_autograd
    def release(self) -> None:
        """Undo the sharding on all ranks: plain full parameters on the engine's device, no hooks, no groups.

        Raises:
            RuntimeError: ranks have written different values to parameters since the last backward.
        """
        self.hide_whole(keep=False)
        self.timeline.close()
        # What was written before an exception may differ, and is nobody's concern any more.
        confirms = not self.passes.aborted
        self.abort()
        self.passes.recover("engine.release(), which all ranks must call")
        self.settle()
        self.writes.take_all_over()
        if confirms:
            self.writes.confirm_if_any()
        self.passes.hooks.remove()
        for undo in self._undo:
            undo()
        for bucket in self.buckets:
            bucket.show_plain(bucket.full_master())
            for info in bucket.params:
                # A copy: as a view each parameter would keep the memory of its whole bucket, and torch.save would write
                # it.
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

    def restage(self, stage: Any = None, offload: Any = None, *, follow: Sequence[Follow] = ()) -> None:
        """Go on with another row of ``zero/stage``, of ``zero/offload``, or both: between two steps, on all ranks.

        Values go from shard to shard, a bucket at a time: parameters, masters, gradients, and the state of optimizers,
        which stay the same objects. Which ranks share shards stays as it is.

        Args:
            stage: a row's name, or the stage's number; ``None``: as it is.
            offload: a row's name, which keeps the settings that go with it; or all settings of the group.
            follow: called for each bucket before it moves, to move what somebody else holds of it.

        Raises:
            ConfigError: rows that do not go together or have no room, other rows on some ranks, or a step that is under
                way; on all ranks, and nothing has changed.
            Exception: while values moved. Every use of the engine raises from then on.
        """
        config = self.comm.together("restaging: its rows", lambda: with_rows(self.config, stage, offload))
        with host_copy.set_aside(self):
            restage_to(self, config, follow)

    # -- the module whole between runs (whole/host_copy.py) -----------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether the module shows whole parameters on the host, as plain tensors, between runs."""
        return self.host_copy is not None and self.host_copy.is_shown

    def show_whole(self) -> bool:
        """See :func:`~lightning_zero.engine.whole.host_copy.show_whole`."""
        return host_copy.show_whole(self)

    def show_again(self) -> bool:
        """See :func:`~lightning_zero.engine.whole.host_copy.show_again`."""
        return host_copy.show_again(self)

    def hide_whole(self, *, keep: bool = True) -> bool:
        """See :func:`~lightning_zero.engine.whole.host_copy.hide_whole`."""
        return host_copy.hide_whole(self, keep=keep)

    def set_aside(self) -> contextlib.AbstractContextManager[None]:
        """See :func:`~lightning_zero.engine.whole.host_copy.set_aside`."""
        return host_copy.set_aside(self)

    # -- whole values -------------------------------------------------------------------------------------------------

    def state_dict(
        self, *, only_rank_0: bool = True, hollow: Hollow | None = None, trainable_only: bool = False
    ) -> dict[str, Any]:
        """On all ranks: ``module.state_dict()`` with full values on the host; by default empty on other ranks than 0.

        Names, buffers, extra state and the module's own overrides of ``state_dict`` are kept: the dict is made by the
        module, and its parameters are replaced by their values. Tied parameters share one tensor. With ``hollow`` these
        have no values; :meth:`visit_ranges` has them.

        Args:
            trainable_only: leave parameters out that are frozen.
        """
        return module_state.whole_state_dict(
            self, only_rank_0=only_rank_0, hollow=hollow, trainable_only=trainable_only
        )

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """On all ranks, each with the same full ``state``: load it into the shards."""
        with host_copy.set_aside(self):
            return module_state.load_whole(self, state, strict=strict)

    def optimizer_state(
        self, optimizer: Optimizer, *, only_rank_0: bool = True, hollow: Hollow | None = None
    ) -> dict[str, Any]:
        """On all ranks: ``optimizer.state_dict()`` as the plain optimizer would give it, with full tensors on the host.
        By default empty on other ranks than 0. With ``hollow`` tensors have no values; :meth:`visit_ranges` has them.

        Raises:
            ConfigError: ``optimizer`` does not step this engine's shards.
        """
        return optimizer_state.whole_state(self, optimizer, only_rank_0=only_rank_0, hollow=hollow)

    @outside_autograd
    def visit_ranges(
        self,
        wanted: Mapping[Value, torch.dtype],
        copies: Copies,
        visit: Callable[[Range], object],
        *,
        gathered: bool = False,
    ) -> None:
        """Show ``visit`` the values of hollow tensors, a bucket at a time: those that this rank is to give, or all.

        What :meth:`state_dict` has brought up to date must not have changed since.

        Args:
            wanted: the dtype of each.
            copies: see :class:`Hollow`.
            gathered: all of them, each whole: on all ranks, for the same ``wanted``, and ``visit`` must not raise.
        """
        found = ranges.gathered_ranges(self, wanted, copies) if gathered else ranges.own_ranges(self, wanted, copies)
        for part in found:
            visit(part)

    @outside_autograd
    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """On all ranks, each with the same full ``state``, as a plain optimizer's ``state_dict()`` gives it: each rank
        takes its slices.

        Raises:
            ConfigError: the param groups or shapes differ from the optimizer's.
        """
        optimizer_state.load_whole(self, optimizer, state)

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any], what: str) -> None:
        """Refuse what :meth:`load_optimizer_state` would refuse, before anything is loaded.

        Args:
            what: has this state, in words.

        Raises:
            ConfigError: the kinds of the optimizers, the param groups or shapes differ.
        """
        optimizer_state.check_whole(self, optimizer, state, what)

    # -- passes: the engine is told where steps and backwards are (passes/passes.py) -----------------------------------

    def step_scope(self, key: str = "step", *, evaluation: bool = False) -> contextlib.AbstractContextManager[None]:
        """A step: parameters may be used inside, in calls of modules and (those of the root unit) directly.

        All ranks enter it. With ``evaluation`` it ends the pass; otherwise a backward after it does.
        """
        if self.is_whole:
            return self._scope_between_runs(key, evaluation)
        return self.passes.scope(key, evaluation=evaluation)

    @contextlib.contextmanager
    def _scope_between_runs(self, key: str, evaluation: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if evaluation:
                stack.enter_context(self.set_aside())
            else:
                self.hide_whole()  # a backward follows the scope
            stack.enter_context(self.passes.scope(key, evaluation=evaluation))
            yield

    def batch_scope(self, batch: Any, *, evaluation: bool = False) -> contextlib.AbstractContextManager[None]:
        """Around the user's code of a step that is given ``batch``: its units divide along the first dimension of the
        first tensor in it, under ``micro_batches``.

        Raises:
            ConfigError: a batch to train on whose size does not divide.
        """
        return self.passes.vertical.step(batch, evaluation=evaluation)

    def keep_gathered(self, module: nn.Module) -> None:
        """Have the units of the parameters of ``module`` stay gathered from their next use until the pass ends."""
        wanted = {id(param) for param in module.parameters()}
        for unit in self.units[1:]:
            if unit.reshards and any(id(info.param) in wanted for info in unit.infos()):
                self.passes.progress.hold(unit)

    def backward_scope(self) -> contextlib.AbstractContextManager[None]:
        """Around a backward that all ranks run: at its end every bucket is reduced."""
        return self.passes.backward_scope()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward()`` inside :meth:`backward_scope`."""
        with self.backward_scope():
            loss.backward(**kwargs)

    def looking_at_gradients(self, look: Look) -> contextlib.AbstractContextManager[None]:
        """Inside, ``look(info, grad)`` is given each gradient as autograd has made it on this rank, and nothing keeps
        it: gradients that are there stay as they are, and steps and clipping do nothing. Around whole steps, on all
        ranks."""
        return self.passes.looking(look)

    @property
    def looks_at_gradients(self) -> bool:
        return self.passes.look is not None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Let backwards inside accumulate without reducing, where gradients rest replicated (stages 0 and 1).

        Raises:
            ConfigError: on all ranks: ``zero.comm.grad_wire=bf16`` asks for what their sum does not fit into.
        """
        check_accumulation(self.config)
        return self.reducer.no_sync()

    @property
    def has_open_pass(self) -> bool:
        """Whether a forward has come whose backward, or end, has not."""
        return self.passes.key is not None

    def abort(self) -> None:
        """Bring every unit to rest after an exception. Starts no collective, and waits a bounded time for others."""
        self.passes.abort()

    def rest(self) -> None:
        """Come to rest between runs: end the open pass, and wait for steps and gathers in flight. On all ranks."""
        self.passes.leave()
        whole = not self.after_step.has_failed  # else whatever has failed has been raised
        if whole:
            self.after_step.settle()  # after an exception, too, when the others may be gone: no agreement
        self.timeline.run_ends(together=whole and not self.passes.aborted)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Optimizer) -> ShardedOptimizer:
        """Make ``optimizer`` step this engine's shards.

        Raises:
            ConfigError: it cannot step shards, or has parameters that are not ours; the same on all ranks.
        """
        make = partial(self._make_sharded, optimizer)
        sharded = self.comm.together("adding an optimizer", make, undo=ShardedOptimizer.release, patient=True)
        capacity.check_state_fits(self.comm, self.tiers, sharded.state_to_come, self.config.offload)
        self.optimizers.append(sharded)
        return sharded

    def _make_sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        settings, rounds = self.config.optimizer, self.config.precision.stochastic_rounding
        if check_optimizer(optimizer, settings, stochastic_rounding=rounds):
            return WholeOptimizer(
                optimizer,
                self.around_step,
                self.comm,
                {bucket: number for number, bucket in enumerate(self.buckets)},
                window_nbytes=self.config.reduce_bucket_bytes,
                unprobed=settings.whole is Whole.true,
            )
        return ShardedOptimizer(
            optimizer,
            self.around_step,
            device_type=self.comm.device.type,
            declared_elementwise=settings.elementwise,
            stochastic_rounding=rounds,
            state_dtype=settings.state_dtype,
        )

    def drop_optimizers(self) -> None:
        for optimizer in self.optimizers:
            optimizer.release()
        self.optimizers = []
