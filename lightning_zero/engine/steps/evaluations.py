"""Steps that call their closure themselves, as often as they like (LBFGS), with forwards and backwards in between.

::

    step | closure | change masters | closure | change masters | ...
           user's groups  stand-ins  user's groups  stand-ins

Only where all of a tensor is on each rank. Ranks must take the same way: all see the mean of their losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.steps.around import AroundStep
from lightning_zero.engine.steps.owned import Owned, WholeTensor
from lightning_zero.engine.steps.windows import Window
from lightning_zero.optimizers.windowed import StepInParts


class Evaluations:
    """The closure of one step, and the tensors between its calls.

    Args:
        tensors: all that are stepped.
        params: the user's, of the param groups.
        run: calls the closure, with gradients enabled.
    """

    def __init__(
        self,
        parts: StepInParts,
        around: AroundStep,
        comm: Communicator,
        owned: Owned,
        tensors: Sequence[WholeTensor],
        params: Sequence[nn.Parameter],
        run: Callable[[], Any],
    ) -> None:
        self._parts, self._around, self._comm, self._owned = parts, around, comm, owned
        self._tensors, self._params, self._run = tensors, params, run
        self._shown: Window | None = None

    def __call__(self) -> Any:
        """Run a forward and a backward with the masters of now. Returns the mean of the ranks' losses."""
        self.finish()
        with self._parts.paused():
            loss = self._run()
        self.show()
        if not isinstance(loss, Tensor):
            return loss
        return self._comm.sum_(loss.detach().double().clone()).div_(self._comm.world_size).to(loss.dtype)

    def show(self) -> None:
        """Have stand-ins show masters and gradients."""
        self._around.begins(self._params)
        self._shown = Window(self._tensors, self._around.used(), self._owned, self._comm, _nothing_travels)
        self._shown.open()
        self._shown.arrive()

    def finish(self) -> None:
        """Have the model compute with the masters as they are now.

        Raises:
            ConfigError: state has found no room.
        """
        if (window := self._shown) is None:
            return
        self._shown = None
        window.send_back()
        error = window.land()
        window.settle()
        self._around.changed(set(window.buckets), self._params)
        if error is not None:
            raise error


def _nothing_travels(*_: Any) -> Any:
    raise AssertionError("all of each tensor is on each rank")
