"""Tensors inside of a parameter's state, in any nesting of mappings and lists."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StateShape(NamedTuple):
    """A tensor of state, as it depends on its parameter.

    Attributes:
        name: its way in the state, such as ``exp_avg`` or ``Q/0``.
        sides: for each dimension, that of the parameter which it is as long as, or a negative constant length.
    """

    name: str
    sides: tuple[int, ...]
    dtype: torch.dtype

    def nbytes(self, shape: Sequence[int]) -> int:
        """For a parameter of ``shape``."""
        numel = 1
        for side in self.sides:
            numel *= -side if side < 0 else shape[side]
        return numel * self.dtype.itemsize


def shape_of(name: str, leaf: Tensor, small: Tensor) -> StateShape:
    sides = tuple(next((d for d, side in enumerate(small.shape) if side == n), -n) for n in leaf.shape)
    return StateShape(name, sides, leaf.dtype)


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of more than one element inside of a parameter's state, each with its way there."""
    if isinstance(value, Tensor):
        if value.numel() > 1:
            yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from leaves_of(item, f"{name}/{key}" if name else str(key))


def map_leaves(value: Any, change: Callable[[str, Tensor], Any], name: str = "") -> Any:
    """A copy of a state's mappings and lists, with others in the place of the tensors of :func:`leaves_of`."""
    if isinstance(value, Tensor):
        return change(name, value) if value.numel() > 1 else value
    if isinstance(value, Mapping):
        new = {k: map_leaves(v, change, f"{name}/{k}" if name else str(k)) for k, v in value.items()}
        if type(value) is dict:
            return new
        rebuilt: Any = copy.copy(value)
        rebuilt.update(new)
        return rebuilt
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(v, change, f"{name}/{n}") for n, v in enumerate(value)))
    if type(value) in (list, tuple):
        return type(value)(map_leaves(v, change, f"{name}/{n}" if name else str(n)) for n, v in enumerate(value))
    return value


def same(one: Any, other: Any) -> bool:
    """Whether nested values are equal, tensors to the bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return alike and same_bits(one.flatten(), other.flatten())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return bool(one == other) or getattr(type(one), "__eq__", None) is object.__eq__
    except Exception:  # it cannot be compared
        return True


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors of one dtype and device are equal to the bit, NaN and all."""
    first, second = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    if first.shape == second.shape and all((t.storage_offset() | t.numel()) % 8 == 0 for t in (first, second)):
        first, second = first.view(torch.int64), second.view(torch.int64)  # a third of the time
    return torch.equal(first, second)
