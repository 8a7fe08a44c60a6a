"""Has units gathered for a use in the open pass, and dropped when it is over."""

from __future__ import annotations

from lightning_zero.engine.passes.gather_order import GatherOrder
from lightning_zero.engine.passes.progress import Progress
from lightning_zero.engine.steps.after_step import AfterStep
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.unit import State, Unit


class Stays:
    """Of the units of one engine but the root, which stays as long as a pass is open."""

    def __init__(self, order: GatherOrder, progress: Progress, after_step: AfterStep) -> None:
        self._order, self._progress, self._after_step = order, progress, after_step
        self._leaving: Unit | None = None  # its use is over, and it is dropped behind the next gather

    def begin(self, unit: Unit) -> None:
        """``unit`` is needed now."""
        self._after_step.refresh(unit)
        if unit.reshards:
            if unit is self._leaving:
                self._let_go()  # the plan has another gather for it
            self._order.demand(unit)
            self._let_go()
        unit.unshard_wait()

    @outside_autograd
    def end(self, unit: Unit) -> None:
        """A use of ``unit`` is over."""
        may_go = unit.reshards and unit.state is State.GATHERED and self._order.used(unit)
        if may_go and not self._progress.is_held(unit):
            self._let_go()
            # A gather waits for all who used memory that was given back before it was issued. One that could not be
            # issued ahead would wait for this unit's compute.
            if self._order.holds_next:
                self._leaving = unit
            else:
                unit.reshard()

    def _let_go(self) -> None:
        """Drop the unit whose use is over, and whose memory has waited for the next gather to be issued."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving.state is State.GATHERED:
            leaving.reshard()

    def pass_ends(self) -> None:
        self._leaving = None
