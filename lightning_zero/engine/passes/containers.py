"""Finds and changes tensors inside nested containers, such as the arguments and results of modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from numbers import Number
from typing import Any, cast

import torch
from torch import Tensor, nn

PLAIN = (type(None), Number, str, bytes, Enum, torch.dtype, torch.device, torch.Size, torch.layout, type, nn.Module)
_DEPTH = 4  # of objects in objects that are looked into


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Rebuild nested containers (tuples, named tuples, lists, mappings, dataclasses) with changed tensors.

    Containers that hold no changed tensor are returned as they are.
    """
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """As :func:`map_tensors`, with all that is no container in the place of tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [map_leaves(v, change) for v in value]
        return type(value)(*items) if _differ(items, value) else value
    if type(value) in (list, tuple):
        items = [map_leaves(v, change) for v in value]
        return type(value)(items) if _differ(items, value) else value
    if isinstance(value, dict):
        new = {k: map_leaves(v, change) for k, v in value.items()}
        if _differ(new.values(), value.values()):
            return _rebuild_dict(value, new)
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for f in dataclasses.fields(value):
            old = getattr(value, f.name)
            if (new_value := map_leaves(old, change)) is not old:
                changes[f.name] = new_value
        if changes:
            value = copy.copy(value)
            for name, item in changes.items():
                object.__setattr__(value, name, item)  # past a frozen dataclass, of which this is a copy of our own
        return value
    return change(value)


def copy_containers(value: Any) -> Any:
    """``value`` with nested containers of its own, and the same tensors and other objects in them."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copy_containers, value))
    if type(value) in (list, tuple):
        return type(value)(map(copy_containers, value))
    if isinstance(value, dict):
        return _rebuild_dict(value, {k: copy_containers(v) for k, v in value.items()})
    if isinstance(value, set):
        return copy.copy(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for f in dataclasses.fields(value):
            object.__setattr__(new, f.name, copy_containers(getattr(value, f.name)))
        return new
    return value


def _differ(new: Any, old: Any) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))


def _rebuild_dict(value: dict[Any, Any], new: dict[Any, Any]) -> Any:
    rebuilt = copy.copy(value)  # keeps subclasses (OrderedDict, ModelOutput, BatchEncoding)
    for k, v in new.items():
        rebuilt[k] = v
    return rebuilt


def tensors_inside(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Tensors that an object holds in its attributes, in objects of those too."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, PLAIN) and not callable(value):
        if isinstance(value, dict):
            inside: list[Any] = list(value.values())
        elif isinstance(value, (list, tuple, set)):
            inside = list(value)
        else:
            inside = list(getattr(value, "__dict__", {}).values())
        for item in inside:
            yield from tensors_inside(item, depth - 1)


def find_tensors(value: Any, only: tuple[type, ...] | None = None) -> Iterator[Tensor]:
    """All tensors inside nested containers, dataclasses included; or inside containers of the types ``only``."""
    if isinstance(value, Tensor):
        yield value
    elif only is not None:
        if isinstance(value, only):
            for item in cast(Iterable[Any], value):
                yield from find_tensors(item, only)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from find_tensors(getattr(value, f.name))
