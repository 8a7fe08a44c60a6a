"""Keeps a second forward from changing buffers again: running statistics would move on twice in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class BuffersAgain:
    """Of one unit's module, for forwards that are computed again in a backward.

    A buffer that a forward has changed is replaced by a copy while it is computed again. torch's norms are known: they
    change their statistics without telling autograd.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [inner for inner in module.modules() if inner._buffers]
        self._changing: set[tuple[int, str]] = set()  # number of the owner, name

    def _found(self) -> Iterator[tuple[int, nn.Module, str, Tensor]]:
        for number, owner in enumerate(self._owners):
            for name, buffer in owner._buffers.items():
                if buffer is not None and not buffer.is_inference():
                    yield number, owner, name, buffer

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Around a first forward: see what it changes."""
        before = [(*found, found[3]._version) for found in self._found()]
        yield
        for number, owner, name, buffer, version in before:
            if owner._buffers.get(name) is not buffer or buffer._version != version:
                self._changing.add((number, name))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around a second forward: it changes copies. Not undone afterwards, as its backward may read what it has
        changed."""
        replaced = [
            (owner, name, buffer)
            for number, owner, name, buffer in self._found()
            if (number, name) in self._changing or (isinstance(owner, _NormBase) and owner.training)
        ]
        for owner, name, buffer in replaced:
            owner._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for owner, name, buffer in replaced:
                owner._buffers[name] = buffer
