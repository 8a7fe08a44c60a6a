"""What gives back the dtype that it was given: modules that compute in fp32 among lower precision.

Unlike the rest of the engine, this is part of what a module computes: ``torch.compile`` looks into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.passes.containers import find_tensors, map_tensors

_TAKES_ONE_DTYPE = (nn.Bilinear,)  # modules whose kernels refuse inputs of another dtype than their weights


def dtype_hooks(module: nn.Module) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
    """Hooks for ``module``, with keyword arguments: one before a call, if it takes one, and one after it."""
    takes_one = isinstance(module, _TAKES_ONE_DTYPE)
    before_cast: torch.dtype | None = None  # torch shows hooks after a call what those before it have made

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal before_cast
        before_cast = _float_dtype_of(args, kwargs)
        return _in_fp32(args, kwargs)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        given = before_cast if takes_one else _float_dtype_of(args, kwargs)
        if given is None:
            return None
        return map_tensors(output, lambda t: t.to(given) if t.is_floating_point() and t.dtype != given else t)

    return before if takes_one else None, after


def _float_dtype_of(args: Any, kwargs: Any) -> torch.dtype | None:
    return next((t.dtype for t in find_tensors((args, kwargs)) if t.is_floating_point()), None)


def _in_fp32(args: Any, kwargs: Any) -> Any:
    def wide(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    return map_tensors(args, wide), map_tensors(kwargs, wide)
