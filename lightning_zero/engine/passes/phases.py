"""The phases of a pass, and what passes ask of the classes above them."""

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
    """Describes a training or evaluation step that the caller has opened (:meth:`Passes.scope`)."""

    key: str
    evaluation: bool


class Stepper(Protocol):
    """Steps an optimizer; in ``steps/``, above this folder."""

    def settings(self) -> list[dict[str, object]]: ...


class Hooks(Protocol):
    """Follows calls and gradients of modules; in ``hooks.py``, above this file."""

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
