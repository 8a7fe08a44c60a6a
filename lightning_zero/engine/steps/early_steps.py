"""Steps an offloaded bucket inside the backward, as soon as its gradient has been reduced.

That hides more of the step (``worker.py`` draws it). It is right only for callers who know that nothing looks at
gradients or changes them between backward and step, so it must be asked for.

What it brings is a matter of how many tokens a rank has in a step. By arithmetic the CPU's Adam is hidden from
T = 28 eta F / (6 X) tokens on (F: peak FLOP/s, of which the model reaches the fraction eta; X: bytes/s of the host's
memory), and from three times as many where it can hide behind the next forward only. No GPU has measured it yet.

The backward goes on with the values of before the step:

- Where parameters stay in the full buffer (stages 1 and 2) the worker steps the masters only. The gather after the step
  sends what has changed (``Bucket.push``).
- Where they are dropped, a gather could bring stepped values: it is refused (``Unit.unshard_begin``).

A bucket is stepped when each of its parameters has sent a gradient. If another gradient comes, as when a reentrant
checkpoint uses a module twice, the step lacks it: that raises (``Reducer.take``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from lightning_zero.engine.parameters.writes import Writes
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket


class EarlySteps:
    """Whether steps may be early now, and which gradients they wait for."""

    def __init__(self, passes: Passes, reducer: Reducer, writes: Writes) -> None:
        self._passes = passes
        self._reducer = reducer
        self._writes = writes
        self._allowed = False

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, steps may be early."""
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    @contextlib.contextmanager
    def landing(self, landed: Callable[[Bucket], None]) -> Iterator[None]:
        """Around a step's closure: ``landed`` gets each bucket whose gradient is whole, where that is allowed."""
        passes, before = self._passes, self._passes.explicit_backwards

        @outside_autograd
        def once(bucket: Bucket) -> None:
            if passes.explicit and passes.explicit_backwards == before + 1:
                # Before the step owns the masters: what the user wrote is in this rank's copy alone until then.
                self._writes.take_over(bucket)
                landed(bucket)

        self._reducer.landed = once if self._allowed else None
        try:
            yield
            if self._allowed and passes.explicit_backwards > before + 1:
                raise RuntimeError(
                    "the closure of a step ran several backwards inside stepping_in_backward(), and the first has been "
                    "stepped already. Run all but the last before the step."
                )
        finally:
            self._reducer.landed = None
