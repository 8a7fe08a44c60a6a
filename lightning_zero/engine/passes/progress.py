"""Counts what each unit still waits for in the open pass. Until it has come the unit's values stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_zero.engine.units.unit import Unit


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
            own.expected = sum(info.param.requires_grad for info in unit.infos())
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
