"""Stands in the place of the forward of a unit's module: compiled, inside of what computes it again or in chunks.

The module's ``forward`` is replaced and not its call, so that hooks, ours and the user's, run once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import nn

from lightning_zero.engine.passes.hooks import Hooks
from lightning_zero.engine.torch_modes import outside_graphs
from lightning_zero.engine.units.unit import Unit

Around = Callable[["UnitForward", Any, Any], Any]  # of the arguments, and those by name


class UnitForward:
    """The forward of the module of one unit.

    Attributes:
        plain: as it was before sharding.
        inner: ``plain``, or what it was compiled to.
    """

    def __init__(self, unit: Unit, module: nn.Module, hooks: Hooks) -> None:
        self.unit = unit
        self.plain: Callable[..., Any] = module.forward
        self.inner = self.plain
        self._module, self._hooks = ref(module), hooks
        self._around: Around | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has been called."""
        return self.inner is not self.plain

    def compile(self, compile: Callable[[Any], Any]) -> None:
        """Compile it, or compile it otherwise than before."""
        self.inner = compile(self.plain)
        self._put()

    def put_around(self, around: Around) -> None:
        """Have ``around`` called in its place, with this object and the arguments."""
        self._around = around
        self._put()

    def _put(self) -> None:
        # Without the attributes of a compiled forward, by which torch.compile would find a way past this one.
        @functools.wraps(self.plain, updated=())
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs) if self._around is None else self._around(self, args, kwargs)

        if (module := self._module()) is not None:
            # A graph around the unit may not lead through here: a backward would not find the unit's weights.
            self._hooks.replace_forward(module, outside_graphs(forward))
