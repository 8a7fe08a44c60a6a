"""Make one step of an optimizer by several calls of its class's ``step``, each for some of the tensors.

A step may also change settings of a param group (``group["step"] += 1``) or attributes of the optimizer
(``self.steps += 1``). They are reset before each call, so that they end as one call would leave them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

_NAMES = "param_names"  # torch's, in the order of ``params``
_NOT_SETTINGS = ("params", _NAMES)
PLAIN = (bool, int, float, complex, str, type(None))
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_TORCH = ("state", "param_groups", "defaults", *HOOKS)


class Noted(NamedTuple):
    """The value of a param group's setting or an optimizer's attribute before the step, with a copy to restore it."""

    value: Any
    copied: Any
    version: int


class Outcome(NamedTuple):
    """What a step has changed on this rank besides tensors and their state."""

    groups: list[dict[str, Any]]  # new settings of each param group
    stepped: list[bool]  # whether calls listed tensors of the group
    own: dict[str, Any]  # new attributes of the optimizer
    called: bool  # whether this rank has called ``step``

    @property
    def is_there(self) -> bool:
        return bool(self.own) or any(self.groups)


class StepInParts:
    """Makes one optimizer step by several calls, inside a ``with``. During a call, param groups list only the tensors
    that this call steps. ``hides_empty``: param groups without such tensors are removed during a call."""

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any], *, hides_empty: bool = False) -> None:
        self._optimizer, self._step = optimizer, step
        self._hides_empty = hides_empty
        groups = self._groups = list(optimizer.param_groups)
        self._params = [group["params"] for group in groups]
        self._kept = [{name: list(group[name]) for name in _NOT_SETTINGS if name in group} for group in groups]
        self._before = [_noted(group, _NOT_SETTINGS) for group in groups]
        own = {
            name: value for name, value in optimizer.__dict__.items() if isinstance(value, Tensor) or _is_plain(value)
        }
        self._own_before = _noted(own, _OF_TORCH)
        self._own_names = set(optimizer.__dict__)
        self._after: list[dict[str, Any]] = [{} for _ in groups]
        self._stepped = [False] * len(groups)
        self._own_after: dict[str, Any] = {}
        self._called = False

    def __enter__(self) -> StepInParts:
        return self

    def __exit__(self, *_: Any) -> None:
        self._list([list(enumerate(kept["params"])) for kept in self._kept])

    def _list(self, lists: Sequence[Sequence[tuple[int, Tensor]]]) -> None:
        """Set each group's tensors, in the same list object ``params`` as before: optimizers may refer to it."""
        for group, params, kept, listed in zip(self._groups, self._params, self._kept, lists, strict=True):
            params[:] = [tensor for _, tensor in listed]
            group["params"] = params
            if _NAMES in kept:
                group[_NAMES] = [kept[_NAMES][place] for place, _ in listed]

    def call(self, lists: Sequence[Sequence[tuple[int, Tensor]]]) -> None:
        """Call ``step`` once. ``lists``: for each param group, (index in the group, tensor) of each tensor to step."""
        optimizer = self._optimizer
        self._list(lists)
        try:
            if self._hides_empty:  # in place: a wrapper's inner optimizer may share the list
                optimizer.param_groups[:] = [g for g, listed in zip(self._groups, lists, strict=True) if listed]
            self._step(optimizer)
        finally:
            if self._hides_empty:
                optimizer.param_groups[:] = self._groups
        for number, (group, before) in enumerate(zip(self._groups, self._before, strict=True)):
            changed = _taken_back(group, before, _NOT_SETTINGS)
            has_some = bool(lists[number])
            if has_some or not self._stepped[number]:
                self._after[number] = changed
            self._stepped[number] |= has_some
        self._own_after = _taken_back(optimizer.__dict__, self._own_before, self._own_names)
        self._called = True

    @property
    def outcome(self) -> Outcome:
        return Outcome(self._after, self._stepped, self._own_after, self._called)


def keep(optimizer: Optimizer, outcomes: Sequence[Outcome]) -> None:
    """Write the settings and attributes that a step changed into ``optimizer``. ``outcomes``: one for each rank."""
    called = [outcome for outcome in outcomes if outcome.called]
    for number, group in enumerate(optimizer.param_groups):
        found = next((o for o in called if o.stepped[number]), called[0] if called else None)
        if found is not None:
            _set(group, found.groups[number])
    if called:
        _set(optimizer.__dict__, called[0].own)


def _noted(values: Mapping[str, Any], but: Sequence[str]) -> dict[str, Noted]:
    return {name: _note(value) for name, value in values.items() if name not in but}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set, frozenset, deque):
        return all(map(_is_plain, value))
    if type(value) in (dict, OrderedDict, defaultdict):
        return all(map(_is_plain, value.values())) and all(isinstance(key, PLAIN) for key in value)
    return isinstance(value, PLAIN)


def _note(value: Any) -> Noted:
    if isinstance(value, Tensor):
        return Noted(value, value.detach().clone(), value._version)
    if isinstance(value, PLAIN) or callable(value):
        return Noted(value, value, 0)
    try:
        return Noted(value, copy.deepcopy(value), 0)
    except Exception:  # an object of the user's that cannot be copied is left alone
        return Noted(value, value, 0)


def _taken_back(values: dict[str, Any], before: dict[str, Noted], but: Collection[str]) -> dict[str, Any]:
    """Reset ``values`` to ``before``, and remove new names not in ``but``. Return the values this undid, by name."""
    changed: dict[str, Any] = {}
    for name, noted in before.items():
        now = values.get(name)
        if isinstance(now, Tensor):
            if now is noted.value and now._version == noted.version:
                continue
            changed[name] = now.detach().clone()
        elif _equal(now, noted.copied):
            continue
        else:
            changed[name] = copy.deepcopy(now)
        before[name] = _take_back(values, name, noted)
    for name in [name for name in values if name not in before and name not in but]:
        changed[name] = values.pop(name)
    return changed


def _take_back(values: dict[str, Any], name: str, noted: Noted) -> Noted:
    if isinstance(value := noted.value, Tensor):  # keep the object, which a scheduler may hold
        with torch.no_grad():
            value.copy_(noted.copied)
    else:
        now = values.get(name)
        value = noted.copied if isinstance(noted.copied, PLAIN) else copy.deepcopy(noted.copied)
        if now is noted.value and _refill(now, value):
            value = now
    values[name] = value
    return Noted(value, noted.copied, value._version if isinstance(value, Tensor) else 0)


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(type(one) is type(other) and one == other)
    except Exception:  # arrays or tensors inside
        return False


def _set(values: dict[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        held = values.get(name)
        if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
            with torch.no_grad():
                held.copy_(value)
        elif not _refill(held, value):
            values[name] = value


def _refill(held: Any, value: Any) -> bool:
    """Replace the items of the container ``held`` by those of ``value``, in place. Return False if that cannot be."""
    if type(held) is not type(value) or held is value or not isinstance(held, (list, deque, dict, set)):
        return False
    held.clear()
    if isinstance(held, (list, deque)):
        held.extend(value)
    else:
        held.update(value)
    return True
