"""What of a module cannot work on a part of a sequence, as far as its layers say it before a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_zero.config import ConfigError
from lightning_zero.sequence.attention import refused_heads


def check_model(module: nn.Module, size: int, *, syncs_norms: bool = False) -> None:
    """
    Args:
        size: ranks that share a sequence.
        syncs_norms: batch norms are to become synchronized ones.

    Raises:
        ConfigError: a layer that looks along the sequence, or heads that do not divide.
    """
    if size == 1:
        return
    for name, inner in module.named_modules():
        if (why := _looks_along(inner, syncs_norms)) is not None:
            raise ConfigError(
                f"zero.sequence_parallel: expected layers that compute each position by itself, beside attention, got "
                f"{type(inner).__name__} in {name or 'the module itself'}, {why}. Use another layer, or set "
                "zero.sequence_parallel=1."
            )
        for what, heads in _heads(inner):
            if heads % size:
                raise ConfigError(refused_heads(heads, size, f"of {what}{f' in {name}' if name else ''}"))


def _looks_along(module: nn.Module, syncs_norms: bool) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "which hides what it calls"
    if isinstance(module, nn.RNNBase):
        return "which goes from position to position"
    of_all_ranks = isinstance(module, nn.SyncBatchNorm) or (isinstance(module, _BatchNorm) and syncs_norms)
    if isinstance(module, (_BatchNorm, nn.InstanceNorm1d)) and not of_all_ranks:
        return "whose statistics would be those of a part"
    if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
        return "whose kernel reaches over several positions"
    return None


def _heads(module: nn.Module) -> Iterator[tuple[str, int]]:
    if isinstance(module, nn.MultiheadAttention):
        yield "nn.MultiheadAttention", module.num_heads
    config: Any = getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        yield type(config).__name__, heads
    own = getattr(module, "n_head", None)
    if isinstance(own, int):
        yield type(module).__name__, own
