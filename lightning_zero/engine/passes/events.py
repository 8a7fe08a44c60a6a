"""The events that hooks tell a pass: the interface between torch and the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_zero.engine.passes.open_pass import Progress
from lightning_zero.engine.passes.saved_weights import SavedWeights
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.unit import Unit


class PassEvents(Protocol):
    """In the order in which they come: a forward, perhaps a recomputation, the backward."""

    @property
    def units(self) -> Sequence[Unit]: ...

    @property
    def saved(self) -> SavedWeights: ...

    @property
    def progress(self) -> Progress: ...

    def root_called(self, args: Any, kwargs: Any) -> None:
        """The whole module is called, with these arguments."""

    def pre_forward(self, unit: Unit) -> None:
        """The module of ``unit`` is called."""

    def post_forward(self, unit: Unit, *, outermost: bool, awaits_backward: Callable[[], bool]) -> None:
        """The module of ``unit`` returned."""

    def call_ends(self) -> None:
        """The outermost call of a module that holds units returned."""

    def forward_raised(self) -> None:
        """The outermost call of a module ended with an exception."""

    def backward_begins(self) -> None:
        """A backward is running. Every event of a backward may call it first."""

    def recomputes(self, unit: Unit) -> None:
        """The forward of ``unit`` is computed again in a backward."""

    def grad_arrived(self, unit: Unit, bucket: Bucket, slot: int, grad: Tensor, *, shown: bool = False) -> None:
        """Autograd accumulated the gradient of one parameter; ``shown``: a hook of the user's has seen it."""

    def input_grads_arrived(self, unit: Unit, call: int) -> None:
        """The gradients of the inputs of one call are complete."""
