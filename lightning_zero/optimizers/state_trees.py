"""Handle the tensors inside a parameter's state, in any nesting of mappings and lists."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# An optimizer's state of a parameter, or a whole state dict. torch types neither further.
State = dict[str, Any]
Saved = Mapping[str, Any]  # a state that is only read


class StateShape(NamedTuple):
    """The shape of a tensor of optimizer state, as a function of its parameter's shape."""

    name: str  # path in the state, such as ``exp_avg`` or ``Q/0``
    sides: tuple[int, ...]  # of each dimension: index of the parameter's dimension of equal length, or minus the length
    dtype: torch.dtype

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(-side if side < 0 else shape[side] for side in self.sides)

    def nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(self.sizes(shape)) * self.dtype.itemsize


def shape_of(name: str, leaf: Tensor, small: Tensor) -> StateShape:
    sides = tuple(next((d for d, side in enumerate(small.shape) if side == n), -n) for n in leaf.shape)
    return StateShape(name, sides, leaf.dtype)


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for each tensor with more than one element in ``value``, a parameter's state."""
    if isinstance(value, Tensor):
        if value.numel() > 1:
            yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from leaves_of(item, f"{name}/{key}" if name else str(key))


def map_tree(value: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return ``value``, a parameter's state, with mappings and lists copied and each other value replaced by
    ``change(path, value)``. ``name``: the path of ``value``."""

    def inside(key: Any, item: Any) -> Any:
        return map_tree(item, change, f"{name}/{key}" if name else str(key))

    if isinstance(value, Mapping):
        new = {key: inside(key, item) for key, item in value.items()}
        if type(value) is dict:
            return new
        rebuilt: Any = copy.copy(value)
        rebuilt.update(new)
        return rebuilt
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(inside(number, item) for number, item in enumerate(value)))
    if type(value) in (list, tuple):
        return type(value)(inside(number, item) for number, item in enumerate(value))
    return change(name, value)


def map_leaves(value: Any, change: Callable[[str, Tensor], Any]) -> Any:
    """Like :func:`map_tree`, but replace only tensors with more than one element."""
    return map_tree(
        value, lambda name, leaf: change(name, leaf) if isinstance(leaf, Tensor) and leaf.numel() > 1 else leaf
    )


@dataclass(frozen=True, slots=True)
class Leaf:
    """Describes a tensor of optimizer state in messages between ranks. ``name``: the tensor's path in the state."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def with_leaves(entry: Any, value_of: Callable[[Leaf], Any]) -> Any:
    """Return a copy of ``entry``, a parameter's state, with each :class:`Leaf` replaced by ``value_of(leaf)``."""
    # Copy deep: an optimizer would raise a step count that parameters share once for each parameter.
    return map_tree(entry, lambda _, value: value_of(value) if isinstance(value, Leaf) else copy.deepcopy(value))


def leaves_in(entry: Any) -> list[Leaf]:
    """Return the :class:`Leaf` objects in ``entry``, a parameter's state, in an order that is the same on all ranks."""
    found: list[Leaf] = []
    map_tree(entry, lambda _, value: found.append(value) if isinstance(value, Leaf) else None)
    return found


def same(one: Any, other: Any) -> bool:
    """Return whether two nested values are equal, tensors to the bit. Values that cannot be compared count as equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return alike and same_bits(one.flatten(), other.flatten())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return bool(one == other) or getattr(type(one), "__eq__", None) is object.__eq__
    except Exception:
        return True


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two flat tensors of equal dtype and device are equal to the bit, also where they are NaN."""
    first, second = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    if first.shape == second.shape and all((t.storage_offset() | t.numel()) % 8 == 0 for t in (first, second)):
        first, second = first.view(torch.int64), second.view(torch.int64)  # three times as fast
    return torch.equal(first, second)
