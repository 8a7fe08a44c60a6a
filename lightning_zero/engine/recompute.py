"""Activation checkpointing of units as a setting: a block keeps its inputs, and computes the rest again in backward.

The module's ``forward`` is wrapped, not the module, so that the engine's hooks stay outside: the unit is gathered when
the gradient of its outputs arrives, and the recomputation finds its weights there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from lightning_zero.config import ConfigError, Recompute

WRAPPED = "_lightning_zero_recompute"  # marks a forward that was wrapped here


def recompute_blocks(blocks: Sequence[nn.Module], how: Recompute, *, pin_memory: bool) -> list[Callable[[], None]]:
    """Wrap the forwards of ``blocks``; returns what undoes it.

    Raises:
        ConfigError: there are none.
    """
    if how is Recompute.none:
        return []
    if not blocks:
        raise ConfigError(
            f"zero.activation_checkpointing={how.name}: the model has no blocks that were found to be units. Name "
            "them in zero.unit.classes, or set zero.activation_checkpointing=none."
        )
    offload = how is Recompute.offload
    return [_recompute_forward(block, offload_inputs=offload, pin_memory=pin_memory) for block in blocks]


def _recompute_forward(module: nn.Module, *, offload_inputs: bool, pin_memory: bool) -> Callable[[], None]:
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
