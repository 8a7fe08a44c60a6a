"""Replace the user's `optimizer.step()` by the engine's step. Before each step wait for earlier steps and gathers, and
after each step gather new parameters."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar
from weakref import ReferenceType, WeakMethod

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place, Shown
from lightning_zero.engine.units.param import ParamInfo, values_changed
from lightning_zero.engine.units.unit import Units
from lightning_zero.optimizers.known import OUTSIDE_STEP
from lightning_zero.optimizers.low_bits import PieceMemory
from lightning_zero.optimizers.state_trees import Saved, State

T = TypeVar("T")


class _States(Protocol):
    """The engine, as :class:`Stepping` uses it."""

    def optimizer_state(self, optimizer: Optimizer) -> State: ...
    def load_optimizer_state(self, optimizer: Optimizer, state: Saved) -> None: ...


class Stepping:
    """Replaces `optimizer.step` by the bound method `step`, and the optimizer's state dict methods by collective calls
    of the engine."""

    def __init__(
        self, optimizer: Optimizer, step: Callable[[Callable[[], object] | None], object], around: AroundStep
    ) -> None:
        self._optimizer = optimizer
        self._given = optimizer.__dict__.get("step")  # a learning-rate scheduler's wrapper that counts steps
        self.inner: Callable[[], object] = optimizer.step  # steps the tensors that the param groups list
        # The optimizer must not keep the stepper and the engine alive.
        reference, engine = WeakMethod(step), around.engine

        def step_shards(self: Optimizer, closure: Callable[[], object] | None = None) -> object:
            return _alive(reference())(closure)

        def state_dict(self: Optimizer) -> State:
            return _alive(engine()).optimizer_state(self)

        def load_state_dict(self: Optimizer, state_dict: Saved) -> None:
            _alive(engine()).load_optimizer_state(self, state_dict)

        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # schedulers that are made later look for the mark
            step_shards._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        for name, method in (("step", step_shards), ("state_dict", state_dict), ("load_state_dict", load_state_dict)):
            optimizer.__dict__[name] = types.MethodType(method, optimizer)

    def undo(self) -> None:
        for name in ("step", "state_dict", "load_state_dict"):
            self._optimizer.__dict__.pop(name, None)
        if self._given is not None:
            self._optimizer.__dict__["step"] = self._given


def _alive(found: T | None) -> T:
    if found is None:
        raise RuntimeError("optimizer: the sharded module whose parameters it steps is gone.")
    return found


def run_methods_by(run: Callable[[str, Callable[..., object]], object], optimizer: Optimizer) -> None:
    """Make the methods :data:`OUTSIDE_STEP` of `optimizer` call `run(name, function)`, where `function(optimizer)`
    calls the method of the class. Wrappers that inherit from the class (Lightning's) call `run` too. The object of the
    bound method `run` is not kept alive: without it the methods are those of the class."""
    kind, reference = type(optimizer), WeakMethod(run)

    def replaced(name: str) -> Callable[[Optimizer], object]:
        method = getattr(kind, name)

        def call(self: Optimizer, *args: object, **kwargs: object) -> object:
            alive = reference()
            if alive is None:
                return method(self, *args, **kwargs)
            return alive(name, lambda optimizer: method(optimizer, *args, **kwargs))

        return call

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    optimizer.__class__ = type(kind.__name__, (kind,), names | {name: replaced(name) for name in OUTSIDE_STEP})


class StateBySlice(defaultdict[Tensor, State]):
    """The `state` dict of an optimizer of torch. Keys are slices of masters, or tensors that are stepped whole."""

    around: Callable[[], AroundStep | None] = staticmethod(lambda: None)  # copies have none
    cleared = False

    def clear(self) -> None:
        """Wait for offloaded steps, then clear the state. The next step starts without state."""
        if (around := self.around()) is not None:
            around.after_step.wait_for_steps()
        super().clear()
        self.cleared = True

    def __setitem__(self, key: Tensor, value: State) -> None:  # `state[key]` calls it too, where there is none yet
        super().__setitem__(self._checked(key), value)

    def pop(self, key: Tensor, *default: object) -> object:  # type: ignore[override]
        return super().pop(self._checked(key), *default)

    def get(self, key: Tensor, default: object = None) -> object:  # type: ignore[override]
        return super().get(self._checked(key), default)  # type: ignore[arg-type]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._checked(key))  # type: ignore[arg-type]

    def _checked(self, key: Tensor) -> Tensor:
        if (around := self.around()) is not None and (place := around.places.get(id(key))) is not None:
            raise RuntimeError(
                f"optimizer.state: expected a slice as key, got {place.info.fqn}, whose state is on several ranks. "
                "Read it by optimizer.state_dict() and change it by optimizer.load_state_dict(), both on all ranks."
            )
        return key


class AroundStep:
    """Prepares and finishes the steps of one engine's optimizers. A step calls `begins` first and `ends` last."""

    def __init__(self, units: Units, passes: Passes, engine: ReferenceType[_States]) -> None:
        self._units, self.engine = units, engine
        self.places, self.place_of = units.places, units.place_of
        self.passes, self.after_step = passes, passes.after_step
        self.pieces = PieceMemory()  # buffers for steps in the worker thread, which runs one step at a time

    @outside_autograd
    def begins(self, places: Sequence[Place], what: str = "step") -> None:
        """Wait for earlier steps and gathers, and copy users' writes into the masters, before a step. Collective.
        Raises RuntimeError inside `gather()`, between Trainer runs, and if gradients at `places` are not completely
        reduced."""
        if self.passes.hooks.idle:
            raise RuntimeError(
                f"optimizer.{what}() between runs: the module is whole, each rank has a copy of its own, and this "
                "optimizer changes the shards that ranks have together. Train with trainer.fit(), call it in a hook "
                "(on_train_end), or make an optimizer of your own now: what it writes, on all ranks alike, is what the "
                "next fit starts from."
            )
        if [b for unit in self._units for b in unit.buckets if b.shown is Shown.PLAIN]:
            raise RuntimeError(
                f"optimizer.{what}() inside gather(): what is written to the shown parameters would replace the step's "
                "result. Leave the `with lightning_zero.gather(...)` block first."
            )
        between = self.passes.between
        if between.shown or between.alone or between.kept:
            between.close()
        self.passes.forget_failed()
        self.after_step.wait_for_all()
        self.passes.sharded_grads.forget_cleared(takes=True)
        # Before masters change: later, the written values would be compared with values from after the step.
        self.passes.writes.take_all_over()
        self.passes.reducer.refuse_unreduced(places)
        self.after_step.step_begins()

    @outside_autograd
    def ends(self, changed: set[Bucket], stepped: Sequence[ParamInfo]) -> None:
        """Increment the autograd versions of the `stepped` parameters, and schedule the gathers after the step.
        Collective. Masters of the `changed` buckets are new, or will be when their offloaded steps end."""
        self.after_step.step_ends()
        values_changed(stepped)
        self.passes.masters_changed(changed)
        self.passes.stepped()
        self.passes.timeline.stepped()
