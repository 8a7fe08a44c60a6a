"""Decorators and contexts that set torch's grad, inference, autocast and dtype modes in place of the caller's modes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

P = ParamSpec("P")
R = TypeVar("R")


def outside_autograd(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``method`` to run with grad and inference mode off. Uses of parameters in it do not gather them."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        # torch.func transforms (grad, vmap) refuse in-place writes to tensors from outside, such as the gather buffers.
        if peek_interpreter_stack() is not None:
            with temporarily_clear_interpreter_stack():
                return wrapped(*args, **kwargs)
        # Selective checkpointing must save, and look for, the operations of the model alone.
        if torch._C._len_torch_dispatch_stack() > 0 and any(
            isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode))
            for mode in _get_current_dispatch_mode_stack()
        ):
            with _disable_current_modes():
                return wrapped(*args, **kwargs)
        # Tensors made in inference mode could not be trained. The second guard stops absent parameters from calling
        # the engine. C++ guards take a tenth of the time of ``inference_mode`` and ``no_grad``, and decorated methods
        # are called several times for each unit in each pass.
        with torch._C._InferenceMode(False), torch._C.DisableTorchFunctionSubclass():
            torch._C._set_grad_enabled(False)  # the first guard enables it, and restores it at the end
            return method(*args, **kwargs)

    return wrapped


def outside_graphs(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``method``, which users may call in compiled code, so that ``torch.compile`` does not trace it."""
    disabled: Callable[P, R] = torch.compiler.disable(method)
    return disabled


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def caller_modes() -> tuple[torch.dtype, list[TorchFunctionMode]]:
    """Return torch's default dtype and active function modes (of ``with torch.device``, say), innermost last."""
    return torch.get_default_dtype(), torch.overrides._get_current_function_mode_stack()  # type: ignore


@contextlib.contextmanager
def under_modes(modes: tuple[torch.dtype, Sequence[TorchFunctionMode]]) -> Iterator[None]:
    """Context manager that activates ``modes``, a result of :func:`caller_modes`. Used for recomputation, because
    autograd runs a backward without the modes of its forward."""
    with contextlib.ExitStack() as around:
        around.enter_context(default_dtype(modes[0]))
        _, there = caller_modes()
        for mode in modes[1]:
            if not any(mode is other for other in there):
                around.enter_context(mode)
        yield


def without_history(method: Callable[P, R]) -> Callable[P, R]:
    """Like :func:`outside_autograd`, but call ``method`` directly if grad and inference mode are off already.
    ``method`` must not use parameters."""
    guarded = outside_autograd(method)

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or peek_interpreter_stack() is not None:
            return guarded(*args, **kwargs)
        return method(*args, **kwargs)

    return wrapped


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast is off. It has no effect for a device type without autocast (meta)."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else contextlib.nullcontext()


def callers_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast has the same settings as at the time of this call."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    now = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, dtype=now[0], enabled=now[1])
