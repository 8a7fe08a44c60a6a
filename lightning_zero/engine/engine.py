"""The engine: one sharded module, its units, and the passes through them. No Lightning here.

A *pass* is a forward with its backward, or one evaluation step. It opens the root unit, which stays gathered until the
pass ends; the other units come and go with the calls of their modules. A pass is opened by :meth:`Engine.step_scope`
(the strategy does) or by the first call of a unit's module, and ends with its backward, or, where none follows, with
the call or the scope that opened it.

A backward is *explicit* where the engine is told of it (:meth:`Engine.backward_scope`): its end reduces what is left.
A plain ``loss.backward()`` is noticed by the first hook that fires and ends with autograd's graph task; it reduces only
if a gradient arrived, because ``torch.autograd.grad`` looks the same and brings none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import ConfigError, Offload, Precision, Recompute, ZeroConfig, check_rounding
from lightning_zero.engine import build, capacity
from lightning_zero.engine.bucket import Bucket, Place
from lightning_zero.engine.buffers import BufferSync
from lightning_zero.engine.gradients import Reducer
from lightning_zero.engine.guards import PlaceholderGuard
from lightning_zero.engine.homes import Tiers, opened
from lightning_zero.engine.hooks import Hooks
from lightning_zero.engine.kinds import count_states
from lightning_zero.engine.offload import StepJob, StepWorker, default_threads
from lightning_zero.engine.optimizer import ShardedOptimizer
from lightning_zero.engine.order import GatherOrder
from lightning_zero.engine.recompute import recompute_forward
from lightning_zero.engine.sentinels import Sentinels
from lightning_zero.engine.unit import State, Unit
from lightning_zero.memory.collectives import ABANDON_S, Communicator
from lightning_zero.memory.machine import Share, share_of_machine
from lightning_zero.planning.placement import ON_DEVICE

_DROPPED = "for storage of size 0"  # what torch says of a saved view whose memory is gone
_ENGINES: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that shards ``module``, if ``module`` is the root of one."""
    return _ENGINES.get(module)


def engines() -> list[Engine]:
    """All live engines of this process."""
    return list(_ENGINES.values())


def _close_tiers(tiers: Tiers, pid: int) -> None:
    """Files and locks go with their engine, but not with a forked child's copy of it."""
    if os.getpid() == pid:
        tiers.close()


def outside_autograd(method: Any) -> Any:
    """Engine work neither records autograd history nor makes inference tensors."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapped


class Engine:
    """ZeRO for one module over one process group.

    Attributes:
        units: the root first, then in the order of ``named_modules``.
        comm: collectives, their counts and observers.
        optimizers: the optimizers that step this engine's shards.
        in_backward: a backward is running.
    """

    @outside_autograd
    def __init__(self, module: nn.Module, config: ZeroConfig, group: Any, device: torch.device, node: str) -> None:
        if module in _ENGINES:
            raise ConfigError("this module is sharded already. Call engine.release() before it is sharded again.")
        self.config = config
        self.precision = config.precision.name or Precision.fp32
        check_rounding(config.precision.stochastic_rounding, self.precision)
        self._module = weakref.ref(module)
        groups = build.describe_units(module, config, self.precision)
        topology = capacity.find_topology(groups, config, group, device, node)
        self.comm = Communicator(
            group,
            device,
            transport=config.comm.transport,
            stall_timeout_s=config.stall_timeout_s,
            topology=topology,
        )
        self.tiers = Tiers(ON_DEVICE)
        self._share = share_of_machine(self.comm) if config.offload.name is not Offload.none else Share()
        try:
            self.units: list[Unit] = build.build_units(module, groups, config, self.comm, self._make_tiers(groups))
        except BaseException:
            self.tiers.close()
            raise
        self._worker: StepWorker | None = None
        self._stale: deque[tuple[Unit, list[Bucket]]] = deque()  # refreshes to be issued, in the order of units
        self._places = {id(info.param): Place(b, info) for u in self.units for b in u.buckets for info in b.params}
        self.order = GatherOrder(
            self.units,
            self.comm,
            prefetch_bytes=config.prefetch_bytes,
            keep_bytes=config.keep_gathered_bytes,
            dynamic=config.dynamic,
        )
        self.reducer = Reducer(self.buckets, self.comm, config.reduce_bucket_bytes, dynamic=config.dynamic)
        self.sentinels = Sentinels()
        self.optimizers: list[ShardedOptimizer] = []
        self._pass_key: str | None = None
        self._pass_owner: Unit | None = None
        self._evaluates = False  # the open pass has no backward
        self._scope: tuple[str, bool] | None = None  # key and evaluation of the open step_scope
        self._ordinal = 0
        self.in_backward = False
        self._explicit = False
        self._second_order = False
        self._steps_in_backward = False
        self._explicit_backwards = 0
        self._aborted = False  # an exception has ended a pass since the last one
        self._refuses = True
        self.shown: set[Bucket] = set()  # buckets inside a gather()
        self._guard = PlaceholderGuard(self.buckets)
        self._undo: list[Callable[[], None]] = self._wrap_blocks(module)
        self._buffer_sync = BufferSync(module, self.comm)
        self.hooks = Hooks(self)
        self._register_hooks(module)
        for unit in self.units:
            unit.reshard()
        _ENGINES[module] = self

    def _wrap_blocks(self, module: nn.Module) -> list[Callable[[], None]]:
        how = self.config.activation_checkpointing
        if how is Recompute.none:
            return []
        blocks = [module.get_submodule(unit.name) for unit in self.units[1:]]
        if not blocks:
            raise ConfigError(
                f"zero.activation_checkpointing={how.name}: the model has no blocks that were found to be units. Name "
                "them in zero.unit.classes, or set zero.activation_checkpointing=none."
            )
        pinned = self.comm.device.type == "cuda"
        offload = how is Recompute.offload
        return [recompute_forward(block, offload_inputs=offload, pin_memory=pinned) for block in blocks]

    def _make_tiers(self, groups: Sequence[build.UnitGroup]) -> dict[str, Tiers]:
        """Each unit's row of tiers."""
        taken = {other.tiers.nvme.instance for other in engines() if other.tiers.nvme is not None}
        self.tiers, by_unit = capacity.make_tiers(groups, self.config, self.comm, taken, self._share)
        weakref.finalize(self, _close_tiers, self.tiers, os.getpid())  # also at the end of the process
        return by_unit

    # -- the model --------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the module that was sharded is gone: keep a reference to it"
        return module

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
        for unit in self.units:
            self.hooks.watch_unit(unit, module.get_submodule(unit.name))
        if self.precision in (Precision.bf16, Precision.fp16):
            for inner in build.fp32_modules(module, self.config.precision.fp32_modules):
                self.hooks.keep_output_dtype(inner)
        for inner in module.modules():
            if any(self.owns(p) for p in inner.parameters()):
                self.hooks.guard_module(inner, self._refuse)
        self._watch_trainable()

    def _watch_trainable(self) -> None:
        """Follow the parameters that require a gradient now; frozen ones may have been unfrozen since."""
        for unit in self.units:
            for bucket in unit.buckets:
                for info in bucket.params:
                    if info.param.requires_grad:
                        if not bucket.trainable:
                            bucket.make_trainable()
                        self.hooks.watch_grad(unit, bucket, info.slot)

    @contextlib.contextmanager
    def placeholders_allowed(self) -> Iterator[None]:
        """Inside, state dict calls of the module see placeholders, for callers that put values in their place."""
        previous, self._refuses = self._refuses, False
        try:
            yield
        finally:
            self._refuses = previous

    def _refuse(self, what: str) -> None:
        """Raise where an operation on the module would see placeholders."""
        if not self._refuses:
            return
        plain = (
            what == "state_dict()"
            and self._pass_key is None
            and not any(b.resharding or b.refreshed or (b.has_master and b.trainable) for b in self.buckets)
        )
        if plain or self.shown.issuperset(self.buckets):
            return
        raise RuntimeError(
            f"{what} of a sharded module would read or write placeholders instead of parameters. Use "
            "trainer.save_checkpoint() and trainer.fit(ckpt_path=), or engine.state_dict() and "
            "engine.load_state_dict(), or wrap the call in `with lightning_zero.gather(module):`."
        )

    @outside_autograd
    def release(self) -> None:
        """Undo the sharding on all ranks: plain full parameters on the engine's device, no hooks, no groups."""
        self.abort()
        self.settle()
        self.hooks.remove()
        for undo in self._undo:
            undo()
        for bucket in self.buckets:
            full = bucket.full_master()
            for info in bucket.params:
                start = bucket.layout.slots[info.slot].start
                value = full[start : start + info.numel].view(info.shape)
                info.param.data = value.to(info.dtype, copy=True)
                info.param.grad = None
        for optimizer in self.optimizers:
            optimizer.release()
        if self._worker is not None:
            self._worker.close()
        self.tiers.close()
        self.comm.close()
        _ENGINES.pop(self.module, None)

    # -- whole values (values.py builds on this class, so it is imported late) --------------------------------------

    def state_dict(self, *, only_rank_0: bool = True) -> dict[str, Any]:
        """On all ranks: the module's state dict with full values on the host; empty on other ranks by default."""
        from lightning_zero.engine import values

        return values.module_state_dict(self, only_rank_0=only_rank_0)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """On all ranks, each with the same full ``state``: load it into the shards."""
        from lightning_zero.engine import values

        return values.load_module_state_dict(self, state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, only_rank_0: bool = True) -> dict[str, Any]:
        """On all ranks: ``optimizer.state_dict()`` as without sharding; by default empty on other ranks than 0."""
        from lightning_zero.engine import values

        return values.optimizer_state(self, optimizer, only_rank_0=only_rank_0)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """On all ranks, each with the same full ``state``: load it into the slices."""
        from lightning_zero.engine import values

        values.load_optimizer_state(self, optimizer, state)

    # -- passes -----------------------------------------------------------------------------------------------------

    @outside_autograd
    def begin_pass(self, key: str, *, evaluation: bool, owner: Unit | None = None) -> None:
        """Open the root unit."""
        if self._aborted:
            self._aborted = False
            self.comm.resume()
        self._guard.check()
        self._watch_trainable()
        # Passes of training that follow one another may take different paths; evaluation repeats its own, and does not
        # count among them.
        self._pass_key = f"{key}, evaluating {owner.title if owner else ''}" if evaluation else f"{key}/{self._ordinal}"
        self._evaluates = evaluation
        self._pass_owner = owner
        self._second_order = False
        self.comm.place = f"pass {self._pass_key}"
        self.order.begin(self._pass_key, cyclic=evaluation)
        self._refresh(self.root)
        if self.root.state is State.SHARDED:
            self.root.unshard_begin()
        self.root.unshard_wait()

    @outside_autograd
    def end_pass(self) -> None:
        """Close the root and whatever is still gathered. No-op outside of a pass."""
        if self._pass_key is not None:
            self.order.end()
            self._close_pass()

    def _close_pass(self) -> None:
        self._reshard_all()
        self._pass_key, self._pass_owner = None, None
        self._ordinal += not self._evaluates
        self.comm.place = "between passes"

    @outside_autograd
    def sync_buffers(self) -> None:
        """On all ranks: rank 0's buffers, if they have changed on any rank since."""
        self._buffer_sync.sync(self.module)

    @contextlib.contextmanager
    def step_scope(self, key: str = "step", *, evaluation: bool = False) -> Iterator[None]:
        """A step: parameters may be used inside, in calls of modules and (those of the root unit) directly.

        All ranks enter it. With ``evaluation`` it ends the pass; otherwise a backward after it does.
        """
        self._leave_pass()
        self._ordinal = 0
        self._scope = (key, evaluation)
        try:
            self.begin_pass(key, evaluation=evaluation)
            yield
        except BaseException:
            self._scope = None
            self.abort()
            raise
        self._scope = None
        if evaluation:
            self.end_pass()

    @outside_autograd
    def abort(self) -> None:
        """After an exception: every unit back to rest. Starts no collective, and waits a bounded time for others."""
        deadline = time.monotonic() + ABANDON_S
        self._aborted = True
        if self.in_backward:
            self.reducer.abort(deadline)
        self.order.abort()
        for unit in self.units:
            unit.abandon(deadline)
        self._pass_key, self._pass_owner = None, None
        self.in_backward = self._explicit = self._second_order = False

    @outside_autograd
    def _leave_pass(self) -> None:
        """No backward ended the open pass: a step without one, or the rest of a step after the last one.

        All ranks come here, so all end it: they may have issued different parts of its plan.
        """
        if self.in_backward:
            self.abort()  # an exception in a backward that the engine was not told of
        else:
            self.end_pass()

    def rest(self) -> None:
        """Between runs: no pass is open and no gather in flight."""
        self._leave_pass()
        self.settle()

    def _reshard_all(self) -> None:
        for unit in self.units:
            if unit.resharding and unit.state is not State.SHARDED:
                unit.unshard_wait()
                unit.reshard()

    @outside_autograd
    def settle(self) -> None:
        """Wait for the gathers that a step has issued: masters may be read and changed from here on."""
        self._flush()
        for unit in self.units:
            unit.unshard_wait()

    def wait_for_steps(self) -> None:
        """Wait for offloaded steps: until then they own the gradients that they were given."""
        if self._worker is not None:
            self._worker.wait()
            for bucket in self.buckets:
                bucket.wait_step()

    def _flush(self) -> None:
        """Wait for offloaded steps, and issue the refreshes that follow them."""
        self.wait_for_steps()
        while self._stale:
            self._refresh(self._stale[0][0])

    def _refresh(self, needed: Unit | None = None) -> None:
        """Issue refreshes in the order of units, which is the same on all ranks: up to ``needed``, waiting for its
        step, and on from there as far as steps are done."""
        behind = any(unit is needed for unit, _ in self._stale)
        while self._stale and (behind or self._stale[0][0].step_done):
            unit, buckets = self._stale[0]
            for bucket in buckets:
                bucket.wait_step()  # before it counts as refreshed: one that failed must not pass for done
            self._stale.popleft()
            unit.refresh_begin(buckets)
            behind = behind and unit is not needed

    # -- forward ------------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """The module of ``unit`` is called."""
        recomputed = torch._C._current_graph_task_id() != -1  # a checkpoint around the whole model
        if self.in_backward and not self._explicit and unit is self.root and not recomputed:
            self.abort()  # an exception ended the last backward: nothing told us
        if self._pass_key is None:
            key, evaluation = self._scope or ("call", not torch.is_grad_enabled())
            self.begin_pass(key, evaluation=evaluation, owner=None if self._scope else unit)
        if unit.index:
            self._demand(unit, "forward")
        else:
            unit.unshard_wait()

    @outside_autograd
    def _demand(self, unit: Unit, what: str) -> None:
        self.comm.place = f"{what} of unit {unit.title} in pass {self._pass_key}"
        self._refresh(unit)
        if unit.resharding:
            self.order.demand(unit)
        unit.unshard_wait()

    def post_forward(self, unit: Unit, *, awaits_backward: bool, hidden_outputs: bool) -> None:
        """The module of ``unit`` returned.

        Args:
            awaits_backward: it should be called back in a backward.
            hidden_outputs: ... but no output that could be hooked was found: it must stay gathered.
        """
        if unit is self._pass_owner and not awaits_backward and not self.in_backward:
            self.end_pass()
        elif unit.index and not self.in_backward and not hidden_outputs:
            self._use_over(unit)

    @outside_autograd
    def _use_over(self, unit: Unit) -> None:
        if unit.resharding and unit.state is State.GATHERED and self.order.used(unit):
            unit.reshard()

    # -- backward -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Around a backward that all ranks run: at its end every bucket is reduced."""
        self.begin_backward(explicit=True)
        try:
            yield
        except BaseException as error:
            self.abort()
            if isinstance(error, RuntimeError) and _DROPPED in str(error):
                raise RuntimeError(self._needed_while_dropped()) from error
            raise
        self.end_backward()

    def _needed_while_dropped(self) -> str:
        waiting = [u.title for u in self.units if u.resharding and u.expected > u.arrived]
        return (
            f"backward needed parameters of a unit that had been dropped (one of {', '.join(waiting)}): a tensor left "
            "the unit by another way than its outputs, or the graph was walked a second time (retain_graph). Return "
            "the tensor from the unit's forward, or choose other units with zero.unit.classes."
        )

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward()`` inside :meth:`backward_scope`."""
        with self.backward_scope():
            loss.backward(**kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate without reducing, where gradients rest replicated (stages 0 and 1)."""
        previous, self.reducer.synchronize = self.reducer.synchronize, False
        try:
            yield
        finally:
            self.reducer.synchronize = previous

    @outside_autograd
    def begin_backward(self, *, explicit: bool) -> None:
        """A backward starts; ``explicit``: its end will be told."""
        if self._pass_key is None:
            key, evaluation = self._scope or ("call", False)
            self.begin_pass(key, evaluation=evaluation)
        self.in_backward, self._explicit = True, explicit
        self._explicit_backwards += explicit
        self._flush()
        self.forget_zeroed()
        self.reducer.begin(str(self._pass_key), lambda b: sum(info.param.requires_grad for info in b.params))
        self.sentinels.remove(info for unit in self.units for info in unit.infos())
        for unit in self.units:
            unit.expected = sum(info.param.requires_grad for info in unit.infos())
            unit.arrived = 0
            unit.calls.clear()

    def pre_backward(self, unit: Unit, call: int | None) -> None:
        """The gradient of an output of ``unit`` has been computed: its weights are needed next."""
        if torch.is_grad_enabled():
            self._second_order = True  # create_graph: weights are needed again, at moments no hook tells
        self._notice_backward()
        if not unit.resharding or not unit.index:
            return
        self._demand(unit, "backward")
        if call is not None:
            unit.calls.add(call)

    def _notice_backward(self) -> None:
        if not self.in_backward:
            self.begin_backward(explicit=False)
            torch.autograd.Variable._execution_engine.queue_callback(self._graph_task_ended)

    def input_grads_arrived(self, unit: Unit, call: int) -> None:
        unit.calls.discard(call)
        self._maybe_reshard(unit)

    @outside_autograd
    def grad_arrived(self, unit: Unit, bucket: Bucket, slot: int, grad: Tensor) -> None:
        """Autograd accumulated the gradient of one parameter."""
        self._notice_backward()
        if unit.index and unit.resharding and unit.state is State.SHARDED:
            raise RuntimeError(
                f"unit {unit.title} got a gradient (of {bucket.params[slot].fqn}) before any of its outputs did, while "
                "its parameters were dropped: a tensor left the unit by another way than its outputs. Return it from "
                "the unit's forward, or choose other units with zero.unit.classes."
            )
        self.reducer.take(bucket, slot, grad)
        unit.arrived += 1
        self._maybe_reshard(unit)

    def _maybe_reshard(self, unit: Unit) -> None:
        done = not unit.calls and unit.arrived >= unit.expected
        if done and self.in_backward and unit.index and not self._second_order:
            unit.arrived = 0
            self._use_over(unit)

    @outside_autograd
    def _graph_task_ended(self) -> None:
        if not self.in_backward or self._explicit:
            return
        if self.reducer.has_arrivals:
            self.end_backward()
            return
        # torch.autograd.grad: the forward goes on, or a second backward follows.
        self.in_backward = False
        self._place_sentinels()
        if not self._second_order:
            for unit in self.units[1:]:
                self._use_over(unit)

    @outside_autograd
    def end_backward(self) -> None:
        """The backward is over: reduce what is left, in order, and close the pass."""
        self.comm.place = f"end of backward in pass {self._pass_key}"
        self.reducer.flush()
        self.order.end()  # ranks that are still on their way may need gathers before they come to agree
        self.reducer.end()
        self._place_sentinels()
        self.in_backward = self._explicit = False
        self._close_pass()
        if self._scope is not None:
            self.begin_pass(self._scope[0], evaluation=self._scope[1])

    def _place_sentinels(self) -> None:
        for bucket, grads in self.reducer.grads.items():
            self.sentinels.place(bucket.params[slot] for slot in grads.used)

    # -- gradients between backward and step --------------------------------------------------------------------------

    def forget_zeroed(self) -> None:
        """Drop the gradients that the user has cleared, and zero those zeroed, since the last backward."""
        self.wait_for_steps()
        for bucket, grads in self.reducer.grads.items():
            if grads.used or grads.written or bucket.has_grad:
                cleared, zeroed = self.sentinels.changes(bucket)
                grads.forget(cleared)
                grads.zero(zeroed)

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
        self.check_reduced(params)

    def check_reduced(self, params: Iterable[nn.Parameter]) -> None:
        """Raise where gradients of ``params`` wait for a backward that reduces them.

        Raises:
            RuntimeError: all backwards were run inside ``no_sync``.
        """
        if any(p.info.slot in self.reducer.grads[p.bucket].written for p in map(self.place_of, params)):
            raise RuntimeError(
                "gradients of backwards inside no_sync() have not been reduced over the ranks. Run the last backward "
                "before a step, a norm or clipping outside of no_sync() (sync_grad=True)."
            )

    def used_params(self) -> set[int]:
        """Ids of the parameters that any rank gave a gradient since it was last cleared."""
        return {
            id(info.param)
            for bucket, grads in self.reducer.grads.items()
            for info in bucket.params
            if self.sentinels.has_grad(info) and info.slot in grads.agreed
        }

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Optimizer) -> ShardedOptimizer:
        """Make ``optimizer`` step this engine's shards.

        Raises:
            ConfigError: it is not element-wise, or has parameters that are not ours or are another optimizer's.
        """
        taken = {id(p) for other in self.optimizers for p in other.params()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in taken:
                    raise ConfigError(
                        f"parameter {self.place_of(p).info.fqn} is in two optimizers. Give each parameter to one."
                    )
        sharded = ShardedOptimizer(
            optimizer,
            self.place_of,
            used=self.used_params,
            landing=self._landing,
            before=self._before_step,
            after=self._stepped,
            submit=self._submit,
            device_type=self.comm.device.type,
            declared_elementwise=self.config.optimizer.elementwise,
            stochastic_rounding=self.config.precision.stochastic_rounding,
        )
        capacity.check_state_fits(
            self.comm, self.tiers, sharded.buckets(), count_states(optimizer), self.config.offload
        )
        self.optimizers.append(sharded)
        return sharded

    @contextlib.contextmanager
    def stepping_in_backward(self) -> Iterator[None]:
        """Inside, a step whose closure runs one backward may step a bucket as soon as its gradient has been reduced.

        The backward is the one that the engine is told of; a plain ``loss.backward()`` before it only accumulates. For
        callers who know that nothing looks at gradients or changes them in between: no clipping, no loss scaling,
        no hook of the user's. Only offloaded buckets are stepped so: the others have nothing to hide.
        """
        self._steps_in_backward = True
        try:
            yield
        finally:
            self._steps_in_backward = False

    @contextlib.contextmanager
    def _landing(self, landed: Callable[[Bucket], None]) -> Iterator[None]:
        """Around a step's closure: ``landed`` gets each bucket whose gradient is whole, where that is allowed."""
        backwards = self._explicit_backwards

        @outside_autograd
        def once(bucket: Bucket) -> None:
            if self._explicit and self._explicit_backwards == backwards + 1:
                landed(bucket)

        self.reducer.landed = once if self._steps_in_backward else None
        try:
            yield
            if self._steps_in_backward and self._explicit_backwards > backwards + 1:
                raise RuntimeError(
                    "the closure of a step ran several backwards inside stepping_in_backward(), and the first has been "
                    "stepped already. Run all but the last before the step."
                )
        finally:
            self.reducer.landed = None

    def drop_optimizers(self) -> None:
        for optimizer in self.optimizers:
            optimizer.release()
        self.optimizers = []

    def _stepped(self, changed: set[Bucket]) -> None:
        self._guard.check()
        if self._scope is None:
            self._ordinal = 0
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
        for unit in self.units:
            buckets = [b for b in unit.buckets if b in changed]
            refreshed = [b for b in buckets if b.refreshed]
            for bucket in refreshed:
                bucket.show(gathered=False)
            if refreshed:
                self._stale.append((unit, refreshed))
            if buckets and unit.resharding and unit.state is not State.SHARDED:
                unit.unshard_wait()  # a step inside a pass: what is gathered, in use or ahead, is old
                unit.reshard()
                unit.unshard_begin()
        self._refresh()
        if self._pass_key is not None:
            self._refresh(self.root)
            self.root.unshard_wait()

    def _submit(self, jobs: list[StepJob]) -> None:
        if self._worker is None:
            self._worker = StepWorker(self.config.offload.threads or default_threads(self._share.cpus))
        numbers = {b: i for i, b in enumerate(self.buckets)}
        event = self.comm.streams.mark()
        for job in jobs:
            job.bucket.submitted_event = event
        self._worker.submit([job._replace(number=numbers[job.bucket]) for job in jobs])
