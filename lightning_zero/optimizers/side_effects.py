"""What a step changes besides tensors: settings of param groups (``group["step"] += 1``) and plain attributes of the
optimizer (``self.steps += 1``).

Each rank calls ``step`` once, with its own tensors. A class may change only groups that have tensors, so a rank without
tensors of a group copies the changed settings from another rank."""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.optimizers.state_trees import map_tree

_NAMES = "param_names"  # torch's, in the order of ``params``
_NOT_SETTINGS = ("params", _NAMES)
PLAIN = (bool, int, float, complex, str, type(None))
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_TORCH = ("state", "param_groups", "defaults", *HOOKS)


@contextlib.contextmanager
def listed(optimizer: Optimizer, lists: Sequence[Sequence[tuple[int, Tensor]]]) -> Iterator[None]:
    """Replace the tensors of each param group of ``optimizer`` while the body runs. ``lists``: for each group, pairs
    (index of a parameter in the group, tensor that replaces the parameter). Other parameters are left out."""
    # In the same list objects, to which an optimizer may refer.
    kept = [(group, group["params"], list(group["params"]), group.get(_NAMES)) for group in optimizer.param_groups]
    try:
        for (group, params, _, names), tensors in zip(kept, lists, strict=True):
            params[:] = [tensor for _, tensor in tensors]
            if names is not None:
                group[_NAMES] = [names[place] for place, _ in tensors]
        yield
    finally:
        for group, params, before, names in kept:
            params[:] = before
            group["params"] = params
            if names is not None:
                group[_NAMES] = names


class Effects(NamedTuple):
    """What a step has changed on a rank besides tensors and their state."""

    groups: list[dict[str, Any]]  # new settings of each param group
    stepped: list[bool]  # whether the group listed tensors
    own: dict[str, Any]  # new attributes of the optimizer

    @property
    def digest(self) -> int:
        """Return a number that is equal on ranks with equal effects; 0 if there are none."""
        if not self.own and not any(self.groups):
            return 0
        values = map_tree([self.groups, self.own], lambda _, v: v.tolist() if isinstance(v, Tensor) else v)
        return 1 + zlib.crc32(repr(values).encode())


class Watch:
    """Records, before a step, the param groups' settings and the plain attributes of ``optimizer``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [_noted(group) for group in optimizer.param_groups]
        self._own = _noted(_attributes(optimizer))

    def effects(self, stepped: Sequence[bool]) -> Effects:
        """Return what a step has changed since the constructor ran. ``stepped``: for each group, if it had tensors."""
        pairs = zip(self._optimizer.param_groups, self._groups, strict=True)
        groups = [_changed(group, before) for group, before in pairs]
        return Effects(groups, list(stepped), _changed(_attributes(self._optimizer), self._own))


def take_over(optimizer: Optimizer, effects: Sequence[Effects]) -> None:
    """Write the settings and attributes that a step has changed into ``optimizer``. ``effects`` has one item per rank.
    A group's settings are taken from the first rank that has stepped tensors of the group."""
    for number, group in enumerate(optimizer.param_groups):
        _set(group, next((e for e in effects if e.stepped[number]), effects[0]).groups[number])
    _set(optimizer.__dict__, next((e for e in effects if any(e.stepped)), effects[0]).own)


class _Noted(NamedTuple):
    value: Any
    copied: Any
    version: int  # of a tensor


def _noted(values: Mapping[str, Any]) -> dict[str, _Noted]:
    return {name: _note(value) for name, value in values.items() if name not in _NOT_SETTINGS}


def _note(value: Any) -> _Noted:
    copied = value
    if not isinstance(value, (Tensor, *PLAIN)) and not callable(value):
        with contextlib.suppress(Exception):  # an object of the user's that cannot be copied
            copied = copy.deepcopy(value)
    return _Noted(value, copied, value._version if isinstance(value, Tensor) else 0)


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    own = optimizer.__dict__.items()
    return {name: v for name, v in own if name not in _OF_TORCH and (isinstance(v, Tensor) or _is_plain(v))}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set, frozenset, deque):
        return all(map(_is_plain, value))
    if type(value) in (dict, OrderedDict, defaultdict):
        return all(map(_is_plain, value.values())) and all(isinstance(key, PLAIN) for key in value)
    return isinstance(value, PLAIN)


def _changed(values: Mapping[str, Any], before: Mapping[str, _Noted]) -> dict[str, Any]:
    now = {name: value for name, value in values.items() if name not in _NOT_SETTINGS}
    return {name: v for name, v in now.items() if name not in before or not _is_still(v, before[name])}


def _is_still(now: Any, noted: _Noted) -> bool:
    if isinstance(now, Tensor):
        return now is noted.value and now._version == noted.version
    try:
        return now is noted.copied or bool(type(now) is type(noted.copied) and now == noted.copied)
    except Exception:  # arrays or tensors inside
        return False


def _set(values: dict[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        held = values.get(name)
        if held is value:
            continue
        if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
            with torch.no_grad():
                held.copy_(value)  # keep the object, which a scheduler may hold
        elif not _refill(held, value):
            values[name] = copy.deepcopy(value)


def _refill(held: Any, value: Any) -> bool:
    """If ``held`` and ``value`` are containers of the same type, replace the items of ``held`` in place by those of
    ``value``, and return True. Otherwise change nothing and return False."""
    if type(held) is not type(value) or not isinstance(held, (list, deque, dict, set)):
        return False
    value = copy.deepcopy(value)
    held.clear()
    if isinstance(held, (list, deque)):
        held.extend(value)
    else:
        held.update(value)
    return True
