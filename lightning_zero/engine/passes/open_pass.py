"""Tracks the open pass: its phase, what each unit waits for, and which units stay gathered."""

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
    (Phase.NOTICED, Phase.FORWARD),  # after torch.autograd.grad, without gradients of parameters
}


class Scope(NamedTuple):
    """A step that the caller has opened."""

    key: str
    evaluation: bool


@dataclass(slots=True)
class OpenPass:
    """
    Attributes:
        ends_with_call: the call that opened the pass may end it.
        unused: the pass was opened after a step's last backward, and no module was called in it.
        second_order: a backward of the pass makes a graph.
    """

    key: str | None
    evaluates: bool = False
    ends_with_call: bool = False
    unused: bool = False
    second_order: bool = False


class GraphTask:
    """Watches the run of autograd's engine in which it is created, to notice the end of a plain ``loss.backward()``.

    Args:
        ended: called at the end of the run, unless an exception ended it.
        gone: called when the run is over, in any case. Must not reference this object.
    """

    def __init__(self, ended: Callable[[], None], gone: Callable[[], None]) -> None:
        end = _End(ended)
        # Weakly: a strong reference would keep the object alive, and the pass in its backward.
        self._end = ref(end, lambda _: gone())
        torch.autograd.Variable._execution_engine.queue_callback(end)

    @property
    def is_over(self) -> bool:
        return self._end() is None


class _End:
    """A callback for the end of a graph task. Only autograd references it, so it dies when the task ends or raises."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


@dataclass(slots=True)
class _OfUnit:
    """
    Attributes:
        expected: number of gradients of parameters that a backward brings.
        arrived: number of those that came since the unit was last dropped.
        calls: calls that wait for gradients of their inputs, which need frozen weights.
        is_held: users' code holds values until the pass ends.
    """

    expected: int = 0
    arrived: int = 0
    calls: set[int] = field(default_factory=set)
    is_held: bool = False


class Progress:
    """Counts the gradients that each unit has received in one pass."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = {unit: _OfUnit() for unit in units}

    def backward_begins(self) -> None:
        for unit, own in self._units.items():
            own.expected = sum([info.param.requires_grad for info in unit.infos()])
            own.arrived = 0

    def grad_arrived(self, unit: Unit) -> bool:
        """Count a parameter's gradient. Returns whether the unit has all gradients."""
        own = self._units[unit]
        own.arrived += 1
        return own.arrived >= own.expected

    def await_inputs(self, unit: Unit, call: int) -> None:
        """Make ``unit`` wait for the gradients of one call's inputs."""
        self._units[unit].calls.add(call)

    def inputs_arrived(self, unit: Unit, call: int) -> None:
        self._units[unit].calls.discard(call)

    def hold(self, unit: Unit) -> None:
        """Keep ``unit`` gathered until the pass ends, because users' code holds its values."""
        self._units[unit].is_held = True

    def is_held(self, unit: Unit) -> bool:
        return self._units[unit].is_held

    def is_over(self, unit: Unit) -> bool:
        """Return whether all gradients that need the unit's weights have come. If so, reset for a second backward."""
        own = self._units[unit]
        over = not own.calls and own.arrived >= own.expected
        if over:
            own.arrived = 0
        return over

    def unfinished(self) -> list[Unit]:
        return [unit for unit, own in self._units.items() if own.expected > own.arrived]

    def pass_ends(self) -> None:
        for own in self._units.values():
            own.calls.clear()
            own.is_held = False


class GradSums:
    """Adds up gradients of chunks in fp32, or in their own dtype if that is wider."""

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
        for key in list(self._sums):
            unit, total = self._sums.pop(key)
            yield unit, *key, total


class Stays:
    """Gathers and drops units in a pass, except the root, which stays gathered until the pass ends."""

    def __init__(self, order: GatherOrder, progress: Progress, after_step: AfterStep) -> None:
        self._order, self._progress, self._after_step = order, progress, after_step
        self._leaving: Unit | None = None  # a used unit, which is dropped after the next gather is issued

    def begin(self, unit: Unit) -> None:
        self._after_step.refresh(unit)
        if unit.reshards:
            if unit is self._leaving:
                self._let_go()  # the plan gathers it again
            self._order.demand(unit)
            self._let_go()
        unit.unshard_wait()

    @outside_autograd
    def end(self, unit: Unit) -> None:
        """Drop ``unit`` after a use, if the plan and users of its values allow."""
        may_go = unit.reshards and unit.state is State.GATHERED and self._order.used(unit)
        if may_go and not self._progress.is_held(unit):
            self._let_go()
            # A gather waits for users of memory that was freed before the gather was issued. So free this unit's later.
            if self._order.holds_next:
                self._leaving = unit
            else:
                unit.reshard()

    def _let_go(self) -> None:
        """Drop the used unit that has waited for the next gather."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving.state is State.GATHERED:
            leaving.reshard()

    def pass_ends(self) -> None:
        self._leaving = None
