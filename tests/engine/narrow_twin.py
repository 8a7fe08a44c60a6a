"""Optimizer state in bf16, rounded once more with no part of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer


def narrow_twin(make: Callable[[Any], Optimizer], names: Sequence[str], states: Sequence[str]) -> Any:
    """A maker of an optimizer whose state is rounded after each step; ``names`` are those of its parameters."""

    def build(params: Iterable[Tensor]) -> Optimizer:
        optimizer = make(params)
        step, count = optimizer.step, {}

        def rounding_step(*args: Any) -> None:
            params = zip(names, optimizer.param_groups[0]["params"], strict=True)
            used = [(name, param) for name, param in params if param.grad is not None]
            step(*args)
            for name, param in used:
                count[name] = count.get(name, 0) + 1
                for which, state in enumerate(states):
                    value = optimizer.state[param][state]
                    bits = random_bits(name, param.numel(), count[name], which)
                    rounded = narrowed(value.numpy().reshape(-1), bits)
                    value.copy_(torch.from_numpy(rounded).view(value.shape))

        optimizer.step = rounding_step  # type: ignore[method-assign]
        return optimizer

    return build


TABLE, SPAN = 1 << 20, 1 << 18


def mixed(x: Any) -> Any:
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)) & np.uint64(0xFFFFFFFF)
    return x


NUMBERS = (mixed(np.arange(TABLE, dtype=np.uint64)) & np.uint64(0xFFFF)).astype(np.int64)


def random_bits(name: str, numel: int, step: int, state: int) -> Any:
    """[numel] of 16 bits."""
    starts = (int(mixed(salt(f"{name}/{state}/{block}/{step}"))) % (TABLE - SPAN) for block in range(numel // SPAN + 1))
    return np.concatenate([NUMBERS[start : start + SPAN] for start in starts])[:numel]


def salt(text: str) -> Any:
    found = 0x9E3779B9
    for byte in text.encode():
        found = ((found ^ byte) * 0x01000193) & 0xFFFFFFFF
    return np.uint64(found)


def narrowed(values: Any, noise: Any) -> Any:
    """``values`` [n] fp32 rounded, up where fraction and ``noise`` / 2^16 together make one."""
    bits = values.view(np.uint32).astype(np.int64)
    return ((bits + noise) >> 16 << 16).astype(np.uint32).view(np.float32)
