"""What a forward depends on beside its inputs: random numbers and torch's modes. Kept for the second forward.

And whether it is a trial, of which nothing is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor
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

    @contextlib.contextmanager
    def put_back(self, device_type: str) -> Iterator[None]:
        """Behind the ``with`` the generators go on as if nothing had been drawn inside."""
        with torch.random.fork_rng(devices=self._devices, device_type=device_type):
            yield


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
