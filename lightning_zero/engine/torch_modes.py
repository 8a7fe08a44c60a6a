"""Sets torch's modes for engine work, whatever the modes of its caller are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
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
        # ``no_grad`` comes second, because ``inference_mode(False)`` switches grad mode on. A tensor made in inference
        # mode could never take part in training again. The third switch stops absent parameters from calling the
        # engine.
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return method(*args, **kwargs)

    return wrapped


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast switched off, on devices that know it (the meta device does not)."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else contextlib.nullcontext()
