"""Leads ``optimizer.step()`` of the user's object to the engine, by a method on the object or by a class in between.

An optimizer with a ``step`` of its own that calls ``super().step()`` keeps it: its class gets an ancestor right above
it, whose step is the engine's::

    plain     object.step -------------------------> engine    torch.optim.AdamW.step on runs
    derived   object.step (the user's) -- super() -> engine    torch.optim.AdamW.step on runs
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary, ref

from torch.optim import Optimizer

from lightning_zero.optimizers.known import base_of, overrides_step, without_hooks

Step = Callable[[Callable[[], Any] | None], Any]

_ENGINE = "_lightning_zero_step"  # where an optimizer of an intercepted class keeps what steps it
_CALL = "_lightning_zero_call"  # how far a step of the user's has come with its call of the engine's
_BEFORE, _INSIDE, _BEHIND = range(3)
_BETWEEN = -1  # a place among an optimizer's hooks that torch gives to none
_READS_SLICES = ("state_dict", "load_state_dict")


class Stepping:
    """Leads the steps of ``optimizer`` to ``step``, a bound method whose object is held weakly."""

    def __init__(self, optimizer: Optimizer, step: Step, *, intercept: bool) -> None:
        """
        Args:
            intercept: keep the optimizer's own ``step``, and lead its call of ``super().step()`` to ``step``.
        """
        self._optimizer = optimizer
        self._class = type(optimizer)
        self._given = optimizer.__dict__.get("step")  # a scheduler's, which counts
        weakly = _weak(step)
        base = base_of(optimizer)
        self._has_hooks_inside = not (intercept and base is not None)
        if intercept and base is not None:
            optimizer.__dict__[_ENGINE] = weakly
            optimizer.__class__ = _intercepting(self._class, base)
            # A step that is set on the object (by a scheduler) calls the class that the optimizer had before, past the
            # new one. So it is checked too whether it comes to the engine.
            if (given := self._given) is not None:
                checked = _checking(self._class, lambda _, closure: given(closure))
                optimizer.__dict__["step"] = types.MethodType(_marked_as(given, checked), optimizer)
            # The hooks of torch are around the user's step.
            self._inner: Callable[[], Any] = functools.partial(without_hooks(base.step), optimizer)
        else:
            self._inner = optimizer.step  # type: ignore[assignment]
            optimizer.step = types.MethodType(_step_of(optimizer.step, weakly), optimizer)  # type: ignore[method-assign]
        for method in (state_dict, load_state_dict):
            optimizer.__dict__[method.__name__] = types.MethodType(method, optimizer)

    def inner(self, between: Callable[[], None]) -> None:
        """Make the step of the optimizer's own class, on the tensors that its param groups list.

        Args:
            between: called after the user's hooks that come before a step, which may set a learning rate, and before
                the step.
        """
        hooks = self._optimizer._optimizer_step_pre_hooks
        # Where the hooks of torch are around the user's step they have run, and this dict is not read.
        hooks[_BETWEEN] = lambda *_: between()
        try:
            if not self._has_hooks_inside:
                between()
            self._inner()
        finally:
            del hooks[_BETWEEN]

    def undo(self) -> None:
        self._optimizer.__class__ = self._class
        for name in (_ENGINE, _CALL, "step", *_READS_SLICES):
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
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return engine(closure)

    return _marked_as(given, step)


def _marked_as(given: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``step`` the mark that a scheduler has put on ``given``. A scheduler that is made later looks for it."""
    if hasattr(given, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


# Weakly: a class that a user has made in a function may lead to a model, which would never go.
_INTERCEPTING: WeakValueDictionary[tuple[type, type], type[Optimizer]] = WeakValueDictionary()


def _intercepting(kind: type[Optimizer], base: type[Optimizer]) -> type[Optimizer]:
    """A subclass of ``kind`` with an ancestor between ``kind`` and ``base``, where its ``super().step`` is found.

    It is one for all optimizers of ``kind``. Copies and pickles of an optimizer are of ``kind`` itself.
    """
    found = _INTERCEPTING.get((kind, base))
    if found is not None:
        return found

    def step_of_engine(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self.__dict__[_CALL] = _INSIDE
        engine = self.__dict__.get(_ENGINE)
        # Of a new optimizer that somebody makes by ``type(optimizer)(...)``: it steps nothing of the engine's.
        result = engine(closure) if engine is not None else base.step(self, closure)
        self.__dict__[_CALL] = _BEHIND
        return result

    def reduce_as_plain(self: Optimizer, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        # No pickle can name the class in between, and a copy has nothing of the engine's.
        make, arguments, *rest = reduced
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make = kind.__new__  # what that calls, without its check that the object is of the class
        return (make, tuple(kind if argument is type(self) else argument for argument in arguments), *rest)

    # Asked for at each step: the class is made once, and users may replace the step of theirs later.
    checked = _checking(kind, lambda self, closure: kind.step(self, closure))
    # torch's marks for a step that its hooks are around already: it would put them around this one too, for a new
    # optimizer, and those of all others would run twice.
    checked.hooked, checked.__wrapped__ = True, kind.step  # type: ignore[attr-defined]
    between = type(f"Sharded{base.__name__}", (base,), {"step": step_of_engine})
    methods = {"step": checked, "__reduce_ex__": reduce_as_plain, "__module__": kind.__module__}
    found = _INTERCEPTING[kind, base] = type(kind.__name__, (kind, between), methods)
    return found


def _checking(kind: type[Optimizer], step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``step``, which calls the step of ``kind``: it raises where that has not come to the engine's step, and says
    the way out where lines before or behind that fail.
    """

    def checked(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self.__dict__[_CALL] = _BEFORE
        try:
            result = step(self, closure)
        except Exception as error:
            if self.__dict__[_CALL] != _INSIDE:
                error.add_note(_way_out(kind, self.__dict__[_CALL]))
            raise
        if self.__dict__[_CALL] == _BEFORE:
            raise RuntimeError(_way_out(kind, _BEFORE))
        return result

    return checked


def _way_out(kind: type[Optimizer], call: int) -> str:
    what = "has failed behind its call of" if call == _BEHIND else "has not called"
    return (
        f"{kind.__qualname__}.step() {what} super().step(), and ranks hold only slices of parameters and state there. "
        "If it computes each element from its own value, gradient and state alone, set "
        "zero.optimizer.elementwise=true; else set zero.optimizer.whole=true, by which it steps whole tensors."
    )


def keeps_own_step(optimizer: Optimizer, *, declared_elementwise: bool) -> bool:
    """Whether the optimizer is one of torch's with a ``step`` of its own around it."""
    return base_of(optimizer) is not None and overrides_step(optimizer) and not declared_elementwise


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
