"""Leads ``optimizer.step()`` of the user's object to the engine, by a method on the object."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch.optim import Optimizer

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
