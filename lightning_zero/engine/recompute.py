"""Activation checkpointing of units as a setting: a block keeps its inputs, and computes the rest again in backward.

The module's ``forward`` is wrapped, not the module, so that the engine's hooks stay outside: the unit is gathered when
the gradient of its outputs arrives, and the recomputation finds its weights there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

WRAPPED = "_lightning_zero_recompute"  # marks a forward that was wrapped here


def recompute_forward(module: nn.Module, *, offload_inputs: bool, pin_memory: bool) -> Callable[[], None]:
    """Wrap ``module.forward``; returns what undoes it.

    Args:
        offload_inputs: the inputs that are kept wait in host memory.
        pin_memory: ... which is pinned (there is an accelerator).
    """
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not offload_inputs:
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)
        with save_on_cpu(pin_memory=pin_memory):
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    setattr(forward, WRAPPED, True)
    module.__dict__["forward"] = forward
    return lambda: module.__dict__.pop("forward", None)
