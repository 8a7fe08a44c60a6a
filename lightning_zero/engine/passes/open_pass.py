"""The open pass: its phases, what each unit still waits for in it, and so which units stay gathered.

``GraphTask`` notices the end of a backward that nobody has told the engine of. ``GradSums`` adds gradients that come in
several parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lightning_zero.engine.passes.gather_order import GatherOrder
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.after_step import AfterStep
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.unit import State, Unit


class Phase(Enum):
    BETWEEN = "between passes"
    FORWARD = "a pass is open"
    TOLD = "in a backward whose end will be told"
    NOTICED = "in a backward that was noticed by its first event"


LEGAL = {
    (Phase.BETWEEN, Phase.FORWARD),
    (Phase.FORWARD, Phase.TOLD),
    (Phase.FORWARD, Phase.NOTICED),
    (Phase.FORWARD, Phase.BETWEEN),
    (Phase.TOLD, Phase.BETWEEN),
    (Phase.NOTICED, Phase.BETWEEN),
    (Phase.NOTICED, Phase.FORWARD),  # torch.autograd.grad: no gradient has arrived, and the forward goes on
}


class Scope(NamedTuple):
    """A step that its caller has opened."""

    key: str
    evaluation: bool


@dataclass(slots=True)
class OpenPass:
    """
    Attributes:
        key: see ``Passes.key``.
        evaluates: the pass has no backward.
        ends_with_call: the call that opened the pass may end it.
        unused: the pass was opened behind the last backward of a step, and no module has been called in it.
        second_order: a backward of the pass makes a graph.
    """

    key: str | None
    evaluates: bool = False
    ends_with_call: bool = False
    unused: bool = False
    second_order: bool = False


class GraphTask:
    """The run of autograd's engine inside of which this is made.

    Args:
        ended: is called at its end, unless an exception has ended it.
        gone: is called when it is over, in either case; holds nothing that holds this.
    """

    def __init__(self, ended: Callable[[], None], gone: Callable[[], None]) -> None:
        end = _End(ended)
        # Weakly: a strong reference would leave the pass in its backward for ever.
        self._end = ref(end, lambda _: gone())
        torch.autograd.Variable._execution_engine.queue_callback(end)

    @property
    def is_over(self) -> bool:
        return self._end() is None


class _End:
    """A callback for the end of a graph task.

    Autograd holds the only strong reference. So the object is gone when the task is over, also if an exception has
    ended the task before the callback was called.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


@dataclass(slots=True)
class _OfUnit:
    """
    Attributes:
        expected: gradients of parameters that a backward brings.
        arrived: of those, since the unit was dropped last.
        calls: whose inputs' gradients are still to come: those of frozen weights need the weights.
        is_held: somebody holds values until the pass ends.
    """

    expected: int = 0
    arrived: int = 0
    calls: set[int] = field(default_factory=set)
    is_held: bool = False


class Progress:
    """Of all units in one pass."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = {unit: _OfUnit() for unit in units}

    def backward_begins(self) -> None:
        for unit, own in self._units.items():
            own.expected = sum([info.param.requires_grad for info in unit.infos()])
            own.arrived = 0

    def grad_arrived(self, unit: Unit) -> bool:
        """The gradient of a parameter has come. Returns whether all have."""
        own = self._units[unit]
        own.arrived += 1
        return own.arrived >= own.expected

    def await_inputs(self, unit: Unit, call: int) -> None:
        """The gradients of the inputs of one call will come."""
        self._units[unit].calls.add(call)

    def inputs_arrived(self, unit: Unit, call: int) -> None:
        self._units[unit].calls.discard(call)

    def hold(self, unit: Unit) -> None:
        """Somebody holds values; they stay until the pass ends."""
        self._units[unit].is_held = True

    def is_held(self, unit: Unit) -> bool:
        return self._units[unit].is_held

    def is_over(self, unit: Unit) -> bool:
        """Whether all gradients that need the unit's values have come.

        If so, counting begins again, because a second backward may walk the same graph.
        """
        own = self._units[unit]
        over = not own.calls and own.arrived >= own.expected
        if over:
            own.arrived = 0
        return over

    def unfinished(self) -> list[Unit]:
        """Units some of whose gradients are missing."""
        return [unit for unit, own in self._units.items() if own.expected > own.arrived]

    def pass_ends(self) -> None:
        for own in self._units.values():
            own.calls.clear()
            own.is_held = False


class GradSums:
    """Adds up the gradients that the chunks of one call bring: in fp32, or the dtype of wider ones."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Bucket, int], tuple[Unit, Tensor]] = {}

    def __contains__(self, key: tuple[Bucket, int]) -> bool:
        return key in self._sums

    def add(self, unit: Unit, bucket: Bucket, slot: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if (bucket, slot) in self._sums:
            self._sums[bucket, slot][1].add_(grad)
        else:
            self._sums[bucket, slot] = unit, grad.to(torch.promote_types(grad.dtype, torch.float32))

    def take(self) -> Iterator[tuple[Unit, Bucket, int, Tensor]]:
        """Give the sums away, one by one."""
        for key in list(self._sums):
            unit, total = self._sums.pop(key)
            yield unit, *key, total


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
