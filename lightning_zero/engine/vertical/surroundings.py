"""What a forward depends on beside its inputs: random numbers and torch's modes. Kept for the second forward.

And whether it is a trial, of which nothing is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_zero.engine.torch_modes import function_modes, under_function_modes

_TRYING: ContextVar[bool] = ContextVar("a call is tried", default=False)


def is_trying() -> bool:
    """Whether what is computed now is of no use but to see what comes of it: who counts work leaves it out."""
    return _TRYING.get()


@contextlib.contextmanager
def trying() -> Iterator[None]:
    token = _TRYING.set(True)
    try:
        yield
    finally:
        _TRYING.reset(token)


class RandomState:
    """The state of the generators of the CPU and of the devices of ``tensors``, as it is now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)

    def restore(self, device_type: str) -> None:
        torch.set_rng_state(self._cpu)
        if self._devices:
            set_device_states(self._devices, self._states, device_type=device_type)

    def same(self, other: RandomState) -> bool:
        """Whether no numbers have been drawn between both."""
        pairs = zip((self._cpu, *self._states), (other._cpu, *other._states), strict=True)
        return all(torch.equal(one, another) for one, another in pairs)

    @contextlib.contextmanager
    def put_back(self, device_type: str) -> Iterator[None]:
        """Behind the ``with`` the generators go on as if nothing had been drawn inside."""
        with torch.random.fork_rng(devices=self._devices, device_type=device_type):
            yield


_DRAWS_NOTHING = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}  # by arguments' names


class NothingDrawn(TorchDispatchMode):
    """Inside, calls of any size draw the same numbers: 1/2, or 0 where they are whole; dropout drops nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        off = {name: value for name, value in _DRAWS_NOTHING.items() if name in names}
        if off:
            return func(*(off.get(name, given[name]) for name in names[: len(args)]), **{**(kwargs or {}), **off})
        result = func(*args, **(kwargs or {}))
        return tree_map_only(Tensor, lambda tensor: tensor.fill_(0.5 if tensor.is_floating_point() else 0), result)


class Modes:
    """Autocast as it is now, of the CPU and of ``device_type``, and the function modes."""

    def __init__(self, device_type: str) -> None:
        kinds = [kind for kind in dict.fromkeys(("cpu", device_type)) if torch.amp.is_autocast_available(kind)]
        self._kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._function_modes = function_modes()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Without a cache of casts: a weight that was cast while no graph was made would have no gradient in one."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._kinds:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            stack.enter_context(under_function_modes(self._function_modes))
            yield


def device_type_of(tensors: Sequence[Tensor]) -> str:
    """The device that is not the host, where ``tensors`` lie on one."""
    return next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), "cpu")
