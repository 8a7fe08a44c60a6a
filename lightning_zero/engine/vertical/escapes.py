"""Finds tensors that leave a call by another way than its results: a hook keeps them, or an attribute, or a list.

The first forward of chunks makes no graph. A loss that is computed from such a tensor (router logits that a hook
collects) would have no gradient, and nothing would tell.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_zero.engine.passes.containers import find_tensors


class Escapes(TorchFunctionMode):
    """Inside of it, tensors that functions make are remembered, weakly."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, ref[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in find_tensors(result):
            self._made[id(tensor)] = ref(tensor)
        return result

    def kept(self, known: Iterable[Tensor]) -> Tensor | None:
        """A tensor that is not ``known``, has a history, and lives on although its call is over."""
        expected = {id(tensor) for tensor in known}
        if not self._alive(expected):
            return None
        gc.collect()  # some may be in circles
        return next(iter(self._alive(expected)), None)

    def _alive(self, expected: set[int]) -> list[Tensor]:
        alive = (reference() for reference in self._made.values())
        return [t for t in alive if t is not None and t.grad_fn is not None and id(t) not in expected]
