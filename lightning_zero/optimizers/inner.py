"""Optimizers that wrap others (Lookahead): the state of all of them, and the class's own state dict.

[Note: state of optimizers inside]
A wrapper may keep state of its own, or leave all state to an optimizer in one of its attributes. Tiers, saves and loads
handle the state of one parameter as one mapping: that of the wrapper, with the state of each optimizer inside under the
path of the attribute::

    {"slow": tensor, "base.state": {"exp_avg": tensor, "step": 3}}

A checkpoint file has what the class's own ``state_dict()`` returns, if the class defines one. So it loads anywhere.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.optimizers.state_trees import State

_TORCHS = torch.optim.Optimizer.state_dict


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether the class of ``optimizer`` defines ``state_dict()``. That of bitsandbytes does not count: it nests
    tensors for FSDP, and loads torch's format."""
    owner: Any = next(kind for kind in type(optimizer).__mro__ if "state_dict" in vars(kind))
    return owner.state_dict is not _TORCHS and not owner.__module__.startswith("bitsandbytes.")


def optimizers_in(optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """Return (path, optimizer) for each optimizer in the attributes of ``optimizer``, in any nesting of lists, dicts
    and optimizers. Attributes of other objects are not searched."""
    found: dict[int, tuple[str, Optimizer]] = {id(optimizer): ("", optimizer)}

    def search(held: Any, path: str) -> None:
        if isinstance(held, Optimizer):
            if id(held) in found:
                return
            found[id(held)] = path, held
            search(vars(held), path)
        elif type(held) is dict or isinstance(held, (list, tuple)):
            for key, item in held.items() if type(held) is dict else enumerate(held):
                if key not in ("state", "param_groups"):
                    search(item, f"{path}.{key}" if path else str(key))

    search(vars(optimizer), "")
    return list(found.values())[1:]


class JoinedState:
    """The state of an optimizer and of those inside, by tensor. See [Note: state of optimizers inside]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._inner = [
            (f"{path}.state", inner) for path, inner in optimizers_in(optimizer) if inner.state is not optimizer.state
        ]

    def __len__(self) -> int:
        return sum(map(len, self.dicts()))

    def dicts(self) -> list[dict[Any, Any]]:
        return [self._optimizer.state, *(inner.state for _, inner in self._inner)]

    def get(self, tensor: Tensor) -> State:
        """Return the state of ``tensor``; empty if there is none."""
        found: State = dict.get(self._optimizer.state, tensor, {})  # without the check of a user's key
        inside = {key: state for key, inner in self._inner if (state := inner.state.get(tensor))}
        return {**found, **inside} if inside else found

    def set(self, tensor: Tensor, state: State) -> None:
        keys = {key for key, _ in self._inner}
        self._optimizer.state[tensor] = {name: value for name, value in state.items() if name not in keys}
        for key, inner in self._inner:
            if key in state:
                inner.state[tensor] = state[key]

    def pop(self, tensor: Tensor) -> State:
        """Remove the state of ``tensor`` and return it; empty if there is none."""
        found = self.get(tensor)
        for state in self.dicts():
            state.pop(tensor, None)
        return found


@contextlib.contextmanager
def _having(optimizer: Optimizer, states: Mapping[nn.Parameter, State]) -> Iterator[None]:
    """Context manager in which ``states`` is all state of the optimizer and of those inside, in other dicts. Dicts that
    optimizers share stay shared."""
    every: list[Any] = [optimizer, *(inner for _, inner in optimizers_in(optimizer))]
    kept = [(one, one.state) for one in every]
    dicts = {id(held): defaultdict[Any, Any](dict) for _, held in kept}
    try:
        for one, held in kept:
            one.state = dicts[id(held)]
        joined = JoinedState(optimizer)
        for param, state in states.items():
            joined.set(param, state)
        yield
    finally:
        for one, held in kept:
            one.state = held


def own_state_dict(optimizer: Optimizer, states: Mapping[nn.Parameter, State]) -> State:
    """Return what the class's ``state_dict()`` returns if the parameters have ``states``."""
    with _having(optimizer, states):
        return type(optimizer).state_dict(optimizer)


def load_own_state_dict(
    optimizer: Optimizer, state: Any, dtypes: Mapping[nn.Parameter, torch.dtype], present: Mapping[nn.Parameter, State]
) -> dict[nn.Parameter, State]:
    """Call the class's ``load_state_dict(state)`` while parameters have the ``present`` state. Return the state of the
    parameters afterwards, on the host. ``dtypes``: dtypes of the parameters' masters. Raises what the class raises."""
    # A class casts state to the dtype and device of its parameters, whose dtype may be narrower than the masters'.
    stand_ins = {
        param: nn.Parameter(torch.zeros((), dtype=dtype).expand(param.shape), requires_grad=param.requires_grad)
        for param, dtype in dtypes.items()
    }
    param_of: dict[nn.Parameter, nn.Parameter] = {stand_in: param for param, stand_in in stand_ins.items()}

    def replace(by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for one in [optimizer, *(inner for _, inner in optimizers_in(optimizer))]:
            for group in one.param_groups:  # in the same lists, to which a class may refer
                group["params"][:] = [by.get(param, param) for param in group["params"]]

    replace(stand_ins)
    try:
        with _having(optimizer, {stand_ins[param]: held for param, held in present.items()}):
            type(optimizer).load_state_dict(optimizer, state)
            joined = JoinedState(optimizer)
            return {param: found for stand_in, param in param_of.items() if (found := joined.get(stand_in))}
    finally:
        replace(param_of)
