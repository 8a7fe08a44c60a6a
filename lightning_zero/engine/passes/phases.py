"""The phases of a pass, and the interfaces of objects that passes call but do not import."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from lightning_zero.engine.units.unit import Unit


class Phase(Enum):
    BETWEEN = "between passes"
    FORWARD = "a pass is open"
    BACKWARD = "in a backward whose end will be told"
    IMPLICIT_BACKWARD = "in a backward that was noticed by its first event"


LEGAL = {
    (Phase.BETWEEN, Phase.FORWARD),
    (Phase.FORWARD, Phase.BACKWARD),
    (Phase.FORWARD, Phase.IMPLICIT_BACKWARD),
    (Phase.FORWARD, Phase.BETWEEN),
    (Phase.BACKWARD, Phase.BETWEEN),
    (Phase.IMPLICIT_BACKWARD, Phase.BETWEEN),
    (Phase.IMPLICIT_BACKWARD, Phase.FORWARD),  # after torch.autograd.grad, without gradients of parameters
}


class Scope(NamedTuple):
    """A training or evaluation step opened by :meth:`Passes.scope`, with the kind of its passes."""

    key: str
    evaluation: bool


class Stepper(Protocol):
    """The interface of an object that steps an optimizer; implemented in ``engine/steps/``."""

    def settings(self) -> list[dict[str, object]]: ...


class Hooks(Protocol):
    """The interface of the engine's hooks on modules and parameters; implemented in ``hooks.py``."""

    idle: bool

    @property
    def running(self) -> list[Unit]: ...
    def watch_trainable(self) -> None: ...
    def come_last(self) -> None: ...
    def forget_inputs(self) -> None: ...
    def forget_calls(self) -> None: ...


@dataclass(slots=True)
class OpenPass:
    key: str | None
    evaluates: bool = False
    ends_with_call: bool = False  # the call that opened the pass may end it
    unused: bool = False  # opened after a step's last backward, and no module was called in it
    second_order: bool = False  # a backward of the pass makes a graph
