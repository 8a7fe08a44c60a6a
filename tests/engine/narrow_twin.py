"""Optimizer state in fewer bits, written down once more: number by number in float64, with no part of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK = 256


def narrow_twin(make: Callable[[Any], Optimizer], names: Sequence[str], dtype: str, signed: dict[str, bool]) -> Any:
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
                for which, (state, has_sign) in enumerate(signed.items()):
                    value = optimizer.state[param][state]
                    bits = random_bits(name, param.numel(), count[name], which)
                    rounded = narrowed(value.numpy().reshape(-1), bits, dtype, has_sign)
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


def narrowed(values: Any, noise: Any, dtype: str, signed: bool) -> Any:
    """``values`` [n] fp32 rounded, up where fraction and ``noise`` / 2^16 together make one."""
    if dtype == "bf16":
        bits = values.view(np.uint32).astype(np.int64)
        return ((bits + noise) >> 16 << 16).astype(np.uint32).view(np.float32)
    out = np.empty_like(values)
    for low in range(0, len(values), BLOCK):
        out[low : low + BLOCK] = _block(values[low : low + BLOCK], noise[low : low + BLOCK], signed)
    return out


def _block(values: Any, noise: Any, signed: bool) -> Any:
    powers = 15 if signed else 31
    size = np.abs(values.astype(np.float64))
    exponent = -126 + 3 + powers - 1
    while 1.875 * 2.0**exponent < size.max():
        exponent += 1
    units = [2.0 ** (exponent - powers + 1 + p) / 8 for p in range(powers)]
    levels = np.array([i * units[0] for i in range(8)] + [i * unit for unit in units for i in range(8, 16)] + [np.inf])
    below = np.searchsorted(levels, size, side="right") - 1
    width = np.where(np.isinf(levels[below + 1]), 1.0, levels[below + 1] - levels[below])
    up = np.floor((size - levels[below]) / width * 2**20) + noise * 16 >= 2**20
    code = below + up
    if not signed:
        code = np.maximum(code, size > 0)
    return (levels[code] * np.sign(values)).astype(np.float32)
