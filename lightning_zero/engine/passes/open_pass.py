"""What is known of the open pass, and the phases that it goes through."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


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
