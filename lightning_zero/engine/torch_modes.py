"""The modes of torch that engine work runs in, whatever its caller's are."""

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
    """Engine work neither records autograd history nor makes inference tensors, nor asks itself for parameters."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if peek_interpreter_stack() is not None:  # a transform of torch.func, which would refuse to see buffers filled
            with temporarily_clear_interpreter_stack():
                return wrapped(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return method(*args, **kwargs)

    return wrapped


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast switched off, on devices that know it (the meta device does not)."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else contextlib.nullcontext()
