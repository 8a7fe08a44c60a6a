"""Does what comes before and after a step: the waits before it, and the gathers after it.

``ShardedOptimizer.step`` is the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.writes import Writes
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.after_step import AfterStep
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.param import values_changed
from lightning_zero.engine.units.unit import Unit
from lightning_zero.engine.units.worker import StepJob
from lightning_zero.optimizers.low_bits import PieceMemory


class AroundStep:
    """Prepares and follows the steps of all optimizers of one engine. A step calls the methods in their order here.

    Args:
        place_of: finds a parameter's bucket; raises for parameters that the engine does not own.

    Attributes:
        pieces: memory of the steps in the worker, which does one at a time.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        place_of: Callable[[nn.Parameter], Place],
        *,
        passes: Passes,
        reducer: Reducer,
        writes: Writes,
        after_step: AfterStep,
    ) -> None:
        self._units = units
        self.place_of = place_of
        self._passes = passes
        self._reducer = reducer
        self._writes = writes
        self._after_step = after_step
        self.stepped: Callable[[], None] = lambda: None  # called behind every step, on all ranks
        self.pieces = PieceMemory()

    @outside_autograd
    def begins(self, params: Sequence[nn.Parameter]) -> None:
        """Prepare a step: afterwards masters may be changed, and gradients that the user has cleared are gone.

        Raises:
            RuntimeError: parameters are shown by ``gather()``, or are whole between runs, or gradients wait for a
                backward that reduces them.
        """
        if self._passes.hooks.idle:
            raise RuntimeError(
                "optimizer.step() between runs: the module is whole, each rank has a copy of its own, and this "
                "optimizer steps the shards that ranks have together. Train with trainer.fit(), or make an optimizer "
                "of your own now: what it writes, on all ranks alike, is what the next fit starts from."
            )
        if any(bucket.is_plain for unit in self._units for bucket in unit.buckets):
            raise RuntimeError(
                "optimizer.step() inside gather(): what is written to the shown parameters would replace the step's "
                "result. Leave the `with lightning_zero.gather(...)` block first."
            )
        self._passes.forget_failed()
        self._after_step.settle()
        self._passes.sharded_grads.forget_cleared()
        # Before masters change: taken over afterwards, a write would be set against values of after the step.
        self._writes.take_all_over()
        self._reducer.refuse_unreduced(map(self.place_of, params))

    @property
    def looks_at_gradients(self) -> bool:
        """Whether gradients are only looked at, and a step has none."""
        return self._passes.look is not None

    def used(self) -> set[int]:
        """Ids of the parameters that any rank gave a gradient since it was cleared."""
        return self._passes.sharded_grads.used_params()

    def submit(self, jobs: Sequence[StepJob]) -> None:
        """Take the steps of buckets whose masters rest off the device, in the order of the forward."""
        self._after_step.submit(jobs)

    @outside_autograd
    def ends(self, changed: set[Bucket], params: Sequence[nn.Parameter]) -> None:
        """Follow a step.

        Args:
            changed: buckets whose masters are new, or will be when their steps are over.
            params: the parameters that were stepped.
        """
        self._passes.stepped()
        values_changed(self.place_of(param).info for param in params)
        self.masters_changed(changed)
        self.stepped()

    def masters_changed(self, changed: set[Bucket]) -> None:
        """Bring replicated compute parameters up to date by gathers, unit by unit. On all ranks.

        The next forward waits for these gathers. In an open pass those of the root are waited for here.
        """
        self._after_step.masters_changed(changed)
        if self._passes.key is not None:
            self._after_step.refresh(self._units[0])
            self._units[0].unshard_wait()
