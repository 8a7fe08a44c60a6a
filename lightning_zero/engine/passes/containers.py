"""Finds and changes tensors inside nested containers, such as the arguments and results of modules.

``torch.compile`` may trace this file, unlike the rest of the engine, because modules that keep fp32 call it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

PLAIN = (type(None), Number, str, bytes, Enum, torch.dtype, torch.device, torch.Size, torch.layout, type, nn.Module)
Args = tuple[Any, ...]  # of a module or a function that is not the engine's
Kwargs = dict[str, Any]
_T = TypeVar("_T")
_TAKES_ONE_DTYPE = (nn.Bilinear,)  # their kernels refuse inputs of another dtype than the weights'
_DEPTH = 4  # how many levels of objects to search


class TensorPlace:
    """Replaces a tensor in the result of :func:`take_tensors`. Not a dataclass, because :func:`_open` would open it.
    ``number``: the tensor's index in the list of taken tensors."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def _open(value: Any) -> tuple[Sequence[object], Callable[[list[object]], Any]] | None:
    """Return the items of a tuple, list, dict or dataclass, and a function that makes an equal container from a list of
    new items. Return None for any other value."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value, lambda items: type(value)(*items)
    if type(value) in (list, tuple):
        return value, type(value)
    if isinstance(value, dict):

        def with_items(items: list[object]) -> object:
            new = copy.copy(value)  # keeps subclasses (OrderedDict, ModelOutput, BatchEncoding)
            for key, item in zip(value, items, strict=True):
                new[key] = item
            return new

        return list(value.values()), with_items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]

        def with_fields(items: list[object]) -> object:
            new = copy.copy(value)
            for name, item in zip(names, items, strict=True):
                object.__setattr__(new, name, item)  # past a frozen dataclass
            return new

        return [getattr(value, name) for name in names], with_fields
    return None


def map_leaves(value: object, change: Callable[[object], object]) -> Any:
    """Return ``value`` with ``change`` applied to each leaf of nested containers. Copies only changed containers."""
    if isinstance(value, Tensor) or (opened := _open(value)) is None:
        return change(value)
    old, rebuild = opened
    new = [map_leaves(item, change) for item in old]
    return rebuild(new) if any(a is not b for a, b in zip(new, old, strict=True)) else value


def map_tensors(value: _T, change: Callable[[Tensor], Tensor]) -> _T:
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def copy_containers(value: _T) -> _T:
    """Copy nested containers, but not the tensors and other objects in them."""
    if isinstance(value, set):
        return copy.copy(value)
    opened = _open(value)
    return value if opened is None else opened[1]([copy_containers(item) for item in opened[0]])


def take_tensors(value: object) -> tuple[object, list[Tensor]]:
    """Replace each tensor in ``value`` by a :class:`TensorPlace`. Return (the result, list of the taken tensors)."""
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []

    def take(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in numbers:
            numbers[id(leaf)] = len(tensors)
            tensors.append(leaf)
        return TensorPlace(numbers[id(leaf)])

    return map_leaves(value, take), tensors


def put_tensors(form: object, tensors: Sequence[Tensor]) -> Any:
    """Undo :func:`take_tensors`: replace each :class:`TensorPlace` in ``form`` by ``tensors[place.number]``. The
    tensors may differ from the ones that were taken out."""
    return map_leaves(form, lambda leaf: tensors[leaf.number] if isinstance(leaf, TensorPlace) else leaf)


def find_tensors(value: object) -> Iterator[Tensor]:
    """Yield all tensors in nested containers, including sets and any mappings."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from find_tensors(item)


def tensors_inside(value: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in an object's attributes or items, and in nested objects up to ``depth`` levels deep."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, PLAIN) and not callable(value):
        if isinstance(value, dict):
            inside: list[object] = list(value.values())
        elif isinstance(value, (list, tuple, set)):
            inside = list(value)
        else:
            inside = list(getattr(value, "__dict__", {}).values())
        for item in inside:
            yield from tensors_inside(item, depth - 1)


def dtype_hooks(
    module: nn.Module,
) -> tuple[Callable[[nn.Module, Args, Kwargs], tuple[Args, Kwargs]] | None, Callable[..., object]]:
    """Make a pre-hook and a post-hook for a module in fp32. The pre-hook casts inputs to fp32; it is None if inputs may
    have another dtype than weights. The post-hook casts results to the inputs' original dtype."""
    takes_one = isinstance(module, _TAKES_ONE_DTYPE)
    before_cast: torch.dtype | None = None  # torch shows post-hooks the inputs as pre-hooks changed them

    def before(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        nonlocal before_cast
        before_cast = _float_dtype_of(args, kwargs)
        return map_tensors((args, kwargs), lambda t: t.float() if t.is_floating_point() else t)

    def after(module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> object:
        given = before_cast if takes_one else _float_dtype_of(args, kwargs)
        if given is None:
            return None
        return map_tensors(output, lambda t: t.to(given) if t.is_floating_point() and t.dtype != given else t)

    return before if takes_one else None, after


def _float_dtype_of(args: Args, kwargs: Kwargs) -> torch.dtype | None:
    return next((t.dtype for t in find_tensors((args, kwargs)) if t.is_floating_point()), None)
