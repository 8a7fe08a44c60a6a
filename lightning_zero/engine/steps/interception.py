"""Lead `optimizer.step()` of the user's object to the engine, and do what comes before and after each step."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.passes.access import Writes
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.after_step import AfterStep, StepJob
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.param import values_changed
from lightning_zero.engine.units.unit import Unit
from lightning_zero.optimizers.low_bits import PieceMemory
from lightning_zero.optimizers.state_trees import State

Step = Callable[[Callable[[], object] | None], object]

_BETWEEN = -1  # hook id that torch never gives out
_READS_SLICES = ("state_dict", "load_state_dict")


class Stepping:
    """Replace `optimizer.step` by `step`, a bound method whose object is held weakly."""

    def __init__(self, optimizer: Optimizer, step: Step) -> None:
        self._optimizer = optimizer
        self._given = optimizer.__dict__.get("step")  # a scheduler's wrapper that counts steps
        self._inner = optimizer.step
        optimizer.step = types.MethodType(_step_of(optimizer.step, _weak(step)), optimizer)  # type: ignore[method-assign]
        for method in (state_dict, load_state_dict):
            optimizer.__dict__[method.__name__] = types.MethodType(method, optimizer)

    def inner(self, between: Callable[[], None]) -> None:
        """Run the step of the optimizer's own class, on the tensors that its param groups list.

        `between` is called just before, and after the user's step pre-hooks, which may set a learning rate.
        """
        hooks = self._optimizer._optimizer_step_pre_hooks
        hooks[_BETWEEN] = lambda *_: between()
        try:
            self._inner()  # type: ignore[call-arg]
        finally:
            del hooks[_BETWEEN]

    def undo(self) -> None:
        for name in ("step", *_READS_SLICES):
            self._optimizer.__dict__.pop(name, None)
        if self._given is not None:
            self._optimizer.__dict__["step"] = self._given


def _weak(step: Any) -> Step:
    """Wrap `step` so that the optimizer does not keep the engine alive."""
    reference, function = ref(step.__self__), step.__func__

    def call(closure: Callable[[], object] | None) -> object:
        owner = reference()
        if owner is None:
            raise RuntimeError("optimizer.step(): the sharded module whose parameters it steps is gone.")
        return function(owner, closure)

    return call


def _step_of(given: object, engine: Step) -> Callable[..., object]:
    """Make a `step` method that calls `engine`. It copies the mark that a scheduler has set on `given`."""

    def step(self: Optimizer, closure: Callable[[], object] | None = None) -> object:
        return engine(closure)

    if hasattr(given, "_wrapped_by_lr_sched"):  # schedulers that are made later look for the mark
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def state_dict(self: Optimizer) -> State:
    raise RuntimeError(
        "optimizer.state_dict() would give this rank's slices only. Save with trainer.save_checkpoint(path), or call "
        "trainer.strategy.optimizer_state(optimizer) (without a Trainer engine.optimizer_state), on all ranks."
    )


def load_state_dict(self: Optimizer, state_dict: State) -> None:
    raise RuntimeError(
        "optimizer.load_state_dict() cannot load into slices. Go on with trainer.fit(model, ckpt_path=path) (without a "
        "Trainer engine.load_optimizer_state(optimizer, state), on all ranks)."
    )


class AroundStep:
    """Prepare and finish the steps of all optimizers of one engine. A step calls the methods in this order.

    `place_of` raises for parameters that the engine does not own. `stepped` is called after every step, on all ranks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        place_of: Callable[[nn.Parameter], Place],
        *,
        passes: Passes,
        reducer: Reducer,
        writes: Writes,
        after_step: AfterStep,
        stepped: Callable[[], None],
    ) -> None:
        self._units = units
        self.place_of = place_of
        self._passes = passes
        self._reducer = reducer
        self._writes = writes
        self._after_step = after_step
        self._stepped = stepped
        self.pieces = PieceMemory()  # for steps in the worker, which runs one at a time

    @outside_autograd
    def begins(self, params: Sequence[nn.Parameter]) -> None:
        """Wait for earlier steps and gathers, and take over user writes, before masters change. Collective.

        Raises RuntimeError inside `gather()`, between runs, and while gradients wait for a backward that reduces them.
        """
        if self._passes.hooks.idle:
            raise RuntimeError(
                "optimizer.step() between runs: the module is whole, each rank has a copy of its own, and this "
                "optimizer steps the shards that ranks have together. Train with trainer.fit(), or make an optimizer "
                "of your own now: what it writes, on all ranks alike, is what the next fit starts from."
            )
        if any(bucket.is_plain for unit in self._units for bucket in unit.buckets):
            raise RuntimeError(
                "optimizer.step() inside gather(): what is written to the shown parameters would replace the step's "
                "result. Leave the `with lightning_zero.gather(...)` block first."
            )
        self._passes.forget_failed()
        self._after_step.settle()
        self._passes.sharded_grads.forget_cleared()
        # Before masters change: later, the written values would be compared with values of after the step.
        self._writes.take_all_over()
        self._reducer.refuse_unreduced(map(self.place_of, params))

    @property
    def looks_at_gradients(self) -> bool:
        """Whether gradients are only inspected. A step then does nothing."""
        return self._passes.look is not None

    def used(self) -> set[int]:
        """Return ids of the parameters that got a gradient on any rank since gradients were cleared."""
        return self._passes.sharded_grads.used_params()

    def submit(self, jobs: Sequence[StepJob]) -> None:
        self._after_step.submit(jobs)

    @outside_autograd
    def ends(self, changed: set[Bucket], params: Sequence[nn.Parameter]) -> None:
        """Update versions and start refreshes after a step of `params`. Collective.

        Masters of the `changed` buckets are new, or will be when their offloaded steps end.
        """
        self._passes.stepped()
        values_changed([self.place_of(param).info for param in params])
        self.masters_changed(changed)
        self._stepped()

    def masters_changed(self, changed: set[Bucket]) -> None:
        """Refresh replicated compute parameters, unit by unit, after masters have changed. Collective.

        The next forward waits for these gathers. In an open pass this method itself waits for the root's.
        """
        self._after_step.masters_changed(changed)
        if self._passes.key is not None:
            self._after_step.refresh(self._units[0])
            self._units[0].unshard_wait()
