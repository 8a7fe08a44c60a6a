"""Sets torch's modes for engine work, whatever the modes of its caller are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

P = ParamSpec("P")
R = TypeVar("R")


def outside_autograd(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate engine work: no autograd history, no inference tensors, and no questions of parameters to the engine."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        # Inside a transform of torch.func (grad, vmap) the buffers are tensors from outside of the transform, and it
        # refuses writes in place to such tensors. A gather writes to them.
        if peek_interpreter_stack() is not None:
            with temporarily_clear_interpreter_stack():
                return wrapped(*args, **kwargs)
        # A tensor made in inference mode could never take part in training again. The second switch stops absent
        # parameters from calling the engine. These are the guards inside of ``inference_mode`` and ``no_grad``: the
        # classes around them take ten times as long, and this runs several times for each unit in each pass.
        with torch._C._InferenceMode(False), torch._C.DisableTorchFunctionSubclass():
            torch._C._set_grad_enabled(False)  # the first guard has switched it on; at its end it is what it was
            return method(*args, **kwargs)

    return wrapped


def outside_graphs(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate what users may call inside of a compiled function: ``torch.compile`` makes no graphs of what it does."""
    disabled: Callable[P, R] = torch.compiler.disable(method)
    return disabled


def function_modes() -> list[Any]:
    """The modes that are asked for each of torch's functions here, as ``with torch.device(...)`` is one; the innermost
    last. Autograd runs a backward without those of its caller."""
    return torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call, no-any-return]


@contextlib.contextmanager
def under_function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Inside, functions go by ``modes`` of an earlier call too, which a backward has not."""
    with contextlib.ExitStack() as around:
        there = function_modes()
        for mode in modes:
            if not any(mode is other for other in there):
                around.enter_context(mode)
        yield


def without_history(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate engine work on tensors that are no parameters, which comes for each of them in a backward.

    It does what :func:`outside_autograd` does, and costs nearly nothing where the modes are what they mostly are there.
    """
    guarded = outside_autograd(method)

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or peek_interpreter_stack() is not None:
            return guarded(*args, **kwargs)
        return method(*args, **kwargs)

    return wrapped


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast switched off, on devices that know it (the meta device does not)."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else contextlib.nullcontext()
