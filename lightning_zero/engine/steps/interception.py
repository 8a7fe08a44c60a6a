"""Leads ``optimizer.step()`` of the user's object to the engine, by a method on the object; and does what comes before
and after a step: the waits before it, and the gathers after it.
"""

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

Step = Callable[[Callable[[], Any] | None], Any]

_BETWEEN = -1  # a place among an optimizer's hooks that torch gives to none
_READS_SLICES = ("state_dict", "load_state_dict")


class Stepping:
    """Leads the steps of ``optimizer`` to ``step``, a bound method whose object is held weakly."""

    def __init__(self, optimizer: Optimizer, step: Step) -> None:
        self._optimizer = optimizer
        self._given = optimizer.__dict__.get("step")  # a scheduler's, which counts
        self._inner = optimizer.step
        optimizer.step = types.MethodType(_step_of(optimizer.step, _weak(step)), optimizer)  # type: ignore[method-assign]
        for method in (state_dict, load_state_dict):
            optimizer.__dict__[method.__name__] = types.MethodType(method, optimizer)

    def inner(self, between: Callable[[], None]) -> None:
        """Make the step of the optimizer's own class, on the tensors that its param groups list.

        Args:
            between: called after the user's hooks that come before a step, which may set a learning rate, and before
                the step.
        """
        hooks = self._optimizer._optimizer_step_pre_hooks
        hooks[_BETWEEN] = lambda *_: between()
        try:
            self._inner()  # type: ignore[call-arg]
        finally:
            del hooks[_BETWEEN]

    def undo(self) -> None:
        """Give the optimizer its own methods back."""
        for name in ("step", *_READS_SLICES):
            self._optimizer.__dict__.pop(name, None)
        if self._given is not None:
            self._optimizer.__dict__["step"] = self._given


def _weak(step: Any) -> Step:
    """A function that calls ``step``, and does not keep the engine alive for whoever keeps the optimizer."""
    reference, function = ref(step.__self__), step.__func__

    def call(closure: Callable[[], Any] | None) -> Any:
        owner = reference()
        if owner is None:
            raise RuntimeError("optimizer.step(): the sharded module whose parameters it steps is gone.")
        return function(owner, closure)

    return call


def _step_of(given: Any, engine: Step) -> Callable[..., Any]:
    """A ``step`` method that calls ``engine``, with the mark that a scheduler has put on the ``given`` one."""

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return engine(closure)

    if hasattr(given, "_wrapped_by_lr_sched"):  # a scheduler that is made later looks for it
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def state_dict(self: Optimizer) -> dict[str, Any]:
    raise RuntimeError(
        "optimizer.state_dict() would give this rank's slices only. Save with trainer.save_checkpoint(path), or call "
        "trainer.strategy.optimizer_state(optimizer) (without a Trainer engine.optimizer_state), on all ranks."
    )


def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
    raise RuntimeError(
        "optimizer.load_state_dict() cannot load into slices. Go on with trainer.fit(model, ckpt_path=path) (without a "
        "Trainer engine.load_optimizer_state(optimizer, state), on all ranks)."
    )


class AroundStep:
    """Prepares and follows the steps of all optimizers of one engine. A step calls the methods in their order here.

    Args:
        place_of: finds a parameter's bucket; raises for parameters that the engine does not own.
        stepped: called behind every step, on all ranks.

    Attributes:
        pieces: memory of the steps in the worker, which does one at a time.
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
        self.pieces = PieceMemory()

    @outside_autograd
    def begins(self, params: Sequence[nn.Parameter]) -> None:
        """Prepare a step: afterwards masters may be changed, and gradients that the user has cleared are gone.

        Raises:
            RuntimeError: parameters are shown by ``gather()``, or are whole between runs, or gradients wait for a
                backward that reduces them.
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
        # Before masters change: taken over afterwards, a write would be set against values of after the step.
        self._writes.take_all_over()
        self._reducer.refuse_unreduced(map(self.place_of, params))

    @property
    def looks_at_gradients(self) -> bool:
        """Whether gradients are only looked at, and a step has none."""
        return self._passes.look is not None

    def used(self) -> set[int]:
        """Ids of the parameters that any rank gave a gradient since it was cleared."""
        return self._passes.sharded_grads.used_params()

    def submit(self, jobs: Sequence[StepJob]) -> None:
        """Take the steps of buckets whose masters rest off the device, in the order of the forward."""
        self._after_step.submit(jobs)

    @outside_autograd
    def ends(self, changed: set[Bucket], params: Sequence[nn.Parameter]) -> None:
        """Follow a step.

        Args:
            changed: buckets whose masters are new, or will be when their steps are over.
            params: the parameters that were stepped.
        """
        self._passes.stepped()
        values_changed([self.place_of(param).info for param in params])
        self.masters_changed(changed)
        self._stepped()

    def masters_changed(self, changed: set[Bucket]) -> None:
        """Bring replicated compute parameters up to date by gathers, unit by unit. On all ranks.

        The next forward waits for these gathers. In an open pass those of the root are waited for here.
        """
        self._after_step.masters_changed(changed)
        if self._passes.key is not None:
            self._after_step.refresh(self._units[0])
            self._units[0].unshard_wait()
