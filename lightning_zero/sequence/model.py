"""Heads of attention that the ranks of a group cannot divide, as far as layers say it before a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_zero.config import ConfigError
from lightning_zero.sequence.attention import refused_heads


def check_model(module: nn.Module, size: int) -> None:
    """
    Args:
        size: ranks that share a sequence.

    Raises:
        ConfigError: heads that do not divide.
    """
    for name, inner in module.named_modules():
        for what, heads in _heads(inner):
            if heads % size:
                raise ConfigError(refused_heads(heads, size, f"of {what}{f' in {name}' if name else ''}"))


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
