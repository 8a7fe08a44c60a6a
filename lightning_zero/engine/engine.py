"""The engine shards one module. Nothing in this file knows Lightning.

::

    engine.comm         the messages between ranks, and the progress of long work
    engine.hooks        call the engine when modules are called and gradients arrive
    engine.units        the shards: units, their buckets, and the place of each parameter in them
    engine.tiers        the host memory and the files of offloaded shards
    engine.passes       forwards and backwards, and waits for their unfinished messages and steps; its parts:
                        order          issues gathers, in the same order on all ranks
                        reducer        reduces gradients into shards
                        sharded_grads  ``param.grad`` as users see it, norms and clipping
                        writes         users' writes to parameters
                        fence          refuses calls that would see placeholders
                        after_step     offloaded steps, and the gathers that follow steps
    engine.optimizers   step the shards by the users' optimizers
    engine.compiled     units and modules that are compiled

``whole/`` has functions that take an engine: :func:`gather`, optimizers' state dicts, whole parameters between runs.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from lightning_zero.engine.build import LIVE, Core, instances
from lightning_zero.engine.passes.hooks import ENGINE
from lightning_zero.engine.steps.optimizer import Stepper
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units import capacity
from lightning_zero.engine.units.bucket import Shown
from lightning_zero.engine.units.param import disown
from lightning_zero.engine.whole import state_dicts, whole_params
from lightning_zero.engine.whole.restage import Follow
from lightning_zero.engine.whole.restage import restage as restage_to
from lightning_zero.engine.whole.values import FakeTensors, all_entries
from lightning_zero.optimizers.state_trees import Saved, State, leaves_of
from lightning_zero.settings import ConfigError, names_arguments, with_rows

LARGE_NUMEL = 1 << 24  # of parameters whose optimizer state takes more time than a garbage collection


def engine_of(module: nn.Module) -> Engine | None:
    """Return the engine whose root module is ``module``, or None if there is none."""
    return next((engine for engine in engines() if engine._module() is module), None)


def engines() -> list[Engine]:
    return [engine for engine in LIVE if isinstance(engine, Engine)]


class Engine(Core):
    """Shards one module over one process group by ZeRO, and gathers its parameters for each use."""

    # A module shown whole between Trainer runs holds its engine, but its copies and pickles must be plain modules.
    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @outside_autograd
    def release(self) -> None:
        """Undo the sharding: put full parameters on the device, and remove hooks, files and groups of ranks.
        Collective. Raises RuntimeError if ranks have written different values to parameters since the last backward."""
        whole_params.shard_again(self, keep=False)
        passes = self.passes
        passes.timeline.close()
        # After an exception the users' writes may differ between ranks, so they are not compared.
        if confirms := not passes.aborted:
            passes.between.close()
        passes.abort()
        passes.recover("engine.release(), which all ranks must call")
        passes.wait_for_all()
        passes.writes.take_all_over()
        if confirms:
            passes.writes.confirm_if_any()
        self.hooks.remove()
        self.compiled.undo()
        released = [(stepper, weakref.ref(stepper.pause())) for stepper in self.optimizers]
        self.optimizers.clear()
        self._release_optimizers(released, self.comm.device)
        for bucket in self.buckets:
            full = bucket.full_master()
            bucket.show_whole(Shown.PLAIN, (bucket.part_of(full, info) for info in bucket.params))
            for info in bucket.params:
                # Copy: a view would keep the whole bucket in memory, and torch.save would write all of it.
                info.param.data = info.param.data.to(info.dtype, copy=True)
                info.param.grad = None
        disown(info.param for unit in self.units for info in unit.infos)
        passes.after_step.close()
        self.tiers.close()
        self.comm.close()
        self.module.__dict__.pop(ENGINE, None)
        LIVE.discard(self)

    @names_arguments()
    def restage(self, stage: object = None, offload: object = None, *, follow: Sequence[Follow] = ()) -> None:
        """Change the stage, the offload setting, or both, between two steps. Collective.

        All values move from old to new shards, a bucket at a time. Optimizers stay the same objects, and the groups of
        ranks that share shards stay the same.

        Args:
            stage: a name in ``zero/stage`` or the stage's number. None: unchanged.
            offload: a name in ``zero/offload``, or all settings of ``zero.offload``. A name keeps the other settings.
            follow: functions called before each bucket's move with the bucket's index and a :class:`Move`. They move
                values that other objects hold for the bucket's elements (averaged weights).

        Raises ConfigError on all ranks, before any change, if the settings cannot be used or differ between ranks, or
        if a rank is inside a step or a pass. If the move of values fails, every later use of the engine raises.
        """
        config = self.comm.together("restage: its stage and offload", lambda: with_rows(self.config, stage, offload))
        with whole_params.set_aside(self):
            restage_to(self, config, follow, instances())

    # -- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(
        self, *, only_rank_0: bool = True, fakes: FakeTensors | None = None, trainable_only: bool = False
    ) -> State:
        """Return ``module.state_dict()`` with full tensors on the host. Collective. By default only rank 0's tensors
        have values. Tensors on other ranks have only a shape and dtype; a use of their values raises RuntimeError. If
        the module overrides ``state_dict``, its override is called. Tied parameters share one tensor. With
        ``trainable_only`` the dict lacks frozen parameters. With ``fakes`` no tensor has values, on any rank."""
        return state_dicts.module_state(self, only_rank_0=only_rank_0, fakes=fakes, trainable_only=trainable_only)

    def load_state_dict(self, state: Saved, *, strict: bool = True) -> _IncompatibleKeys:
        """Load ``state``, a full state dict that is the same on all ranks, into the shards. Collective."""
        with whole_params.set_aside(self):
            return state_dicts.load_module(self, state, strict=strict)

    # -- steps --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step_scope(self, key: str = "step", *, evaluation: bool = False) -> Iterator[None]:
        """Context manager that opens a pass (a forward and its backward), so that modules can be called and the root's
        parameters read. Collective. The pass ends with the next backward. With ``evaluation`` there is no backward, and
        the pass ends with the ``with`` block. Passes with the same ``key`` share one recorded order of gathers."""
        if not evaluation:
            whole_params.shard_again(self)  # and leave it sharded after the scope: a backward follows
        with whole_params.set_aside(self), self.passes.scope(key, evaluation=evaluation):
            yield

    def add_optimizer(self, optimizer: Optimizer) -> Stepper:
        """Make ``optimizer`` step the shards, and return its stepper. Collective. Raises ConfigError if ``optimizer``
        cannot step shards, has parameters of other modules or was added before, or if a tier lacks memory for the
        optimizer state."""

        self.passes.wait_for_all()  # steps under way use the storages that get this optimizer's state

        def make() -> Stepper:
            if any(known.optimizer is optimizer for known in self.optimizers):
                kind = type(optimizer).__name__
                raise ConfigError(f"add_optimizer: expected another optimizer, got the same {kind} again. Add it once.")
            return self._make_stepper(self, self._around_step, optimizer)

        sharded = self.comm.together("adding an optimizer", make, undo=Stepper.release, patient=True)
        capacity.check_state_fits(self.comm, self.tiers, sharded.state_to_come, self.config.offload)
        self.optimizers.append(sharded)
        self.passes.after_step.count_references()
        return sharded

    def optimizer_state(self, optimizer: Optimizer) -> State:
        """Return the whole ``optimizer.state_dict()`` on the host of every rank. Collective."""
        self.passes.meet("optimizer.state_dict(), which all ranks must call")
        return state_dicts.optimizer_state(self, optimizer, only_rank_0=False)

    def load_optimizer_state(self, optimizer: Optimizer, state: Saved) -> None:
        """Load a whole ``state``, as ``optimizer.load_state_dict(state)`` does. Collective. Raises RuntimeError on all
        ranks if they load different states."""
        self.passes.meet("optimizer.load_state_dict(), which all ranks must call")
        state_dicts.refuse_unequal_loads(self, dict(leaves_of(state)))
        state_dicts.load_optimizer_state(self, optimizer, state)

    def renew_optimizers(self, make: Callable[[], Sequence[Optimizer]]) -> None:
        """Replace the engine's optimizers by those that ``make()``, users' code, returns. Collective. A present
        optimizer that is returned keeps its state, unless it has loaded another state. If a present optimizer is not
        returned but users' code still refers to it, its state becomes whole tensors on the host."""
        self.passes.wait_for_all()
        before, self.optimizers[:] = [*self.optimizers], []
        paused = [(stepper, weakref.ref(stepper.pause())) for stepper in before]
        try:
            listed = make()
        except BaseException:
            for stepper, user in paused:
                if (optimizer := user()) is not None:
                    stepper.resume(optimizer)
            self.optimizers[:] = before
            raise
        wanted = {id(optimizer): optimizer for optimizer in listed}
        # With a state of its own by now, an optimizer has loaded one.
        own = [id(user()) in wanted and not wanted[id(user())].state for _, user in paused]
        goes_on = [all(row) for row in zip(*self.comm.gather_checked(own, "which optimizers come back"), strict=True)]
        self._release_optimizers([pair for pair, goes in zip(paused, goes_on, strict=True) if not goes], "cpu")
        known = {id(user()): stepper for (stepper, user), goes in zip(paused, goes_on, strict=True) if goes}
        for optimizer in listed:
            if id(optimizer) not in known:
                self.add_optimizer(optimizer)
                continue
            self.optimizers.append(known.pop(id(optimizer)))
            self.optimizers[-1].resume(optimizer)
            self.comm.together("adding an optimizer", self.optimizers[-1].places)

    @outside_autograd
    def _release_optimizers(
        self, paused: Sequence[tuple[Stepper, weakref.ref[Optimizer]]], device: torch.device | str
    ) -> None:
        """Put the state of the ``paused`` optimizers into their ``state`` dicts, as whole tensors on ``device``. Drop
        the state of optimizers that no rank refers to any more. Collective."""
        if not paused:
            return
        if sum(info.numel for bucket in self.buckets for info in bucket.params) > LARGE_NUMEL:
            gc.collect()  # optimizers lie in cycles, and large states are not to be gathered for nobody
        held = [user() is not None for _, user in paused]
        is_held = [any(row) for row in zip(*self.comm.gather_checked(held, "which optimizers are left"), strict=True)]
        for (stepper, user), gives in zip(paused, is_held, strict=True):
            known = all_entries(self, stepper) if gives else {}
            states = state_dicts.whole_states(self, stepper, known, device=device) if gives else {}
            stepper.release()
            optimizer = user()
            if optimizer is not None and not optimizer.state:
                for (number, slot), state in states.items():
                    optimizer.state[self.buckets[number].params[slot].param] = state
