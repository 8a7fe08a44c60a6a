"""What the engine asks of whatever makes a user's optimizer step its shards.

The optimizer object is kept, because schedulers and callbacks hold it. Outside ``step`` its param groups list the
user's own Parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.steps.around import AroundStep
from lightning_zero.engine.steps.interception import Stepping
from lightning_zero.engine.steps.runs import ParamStates
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.kept import Sliced
from lightning_zero.optimizers.state_trees import Leaf
from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.placement import StageRow, Tier
from lightning_zero.ranks.progress import SILENT, LongWork


class Stepper(ABC):
    """Makes ``optimizer.step`` step the shards of an engine.

    Attributes:
        optimizer: the user's object, patched.
    """

    def __init__(self, optimizer: Optimizer, around: AroundStep) -> None:
        self.optimizer = optimizer
        self._around = around

    def _patch(self, *, intercept: bool = False) -> None:
        """Lead the optimizer's ``step`` to this object, once it is known that it can be stepped.

        Args:
            intercept: see :class:`Stepping`.
        """
        self._stepping = Stepping(self.optimizer, self.step, intercept=intercept)

    # -- the user's object ----------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give the optimizer its own step back. State is dropped."""
        self._stepping.undo()
        self.optimizer.state.clear()
        self._around.pieces.clear()

    def places(self) -> list[list[Place]]:
        """Where the parameters of each param group live.

        Raises:
            ConfigError: a parameter is not part of the sharded module.
        """
        return [[self._around.place_of(p) for p in group["params"]] for group in self.optimizer.param_groups]

    def params(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def buckets(self) -> list[Bucket]:
        """The buckets whose masters this optimizer steps, in order."""
        return list(self.groups())

    def groups(self) -> dict[Bucket, dict[int, int]]:
        """For each bucket: slot -> param group."""
        result: dict[Bucket, dict[int, int]] = {}
        for index, group in enumerate(self.places()):
            for place in group:
                result.setdefault(place.bucket, {})[place.info.slot] = index
        return result

    def _pop_states(self) -> dict[tuple[Bucket, int], dict[str, Any]]:
        """Take the state that the optimizer holds for whole parameters: of earlier steps, or of its making."""
        states = {
            (place.bucket, place.info.slot): self.optimizer.state.pop(place.info.param, {})
            for places in self.places()
            for place in places
        }
        return {key: state for key, state in states.items() if state}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do the user's ``optimizer.step``: the closure first, which needs the user's own groups, then the shards."""
        loss = None
        if closure is not None:
            with torch.enable_grad():  # callers may step under ``no_grad``, and the closure runs a forward
                loss = closure()
        if self._around.looks_at_gradients:
            return loss
        self._around.begins(self.params())
        used = self._around.used()
        changed = self._step(used)
        self._around.ends(changed, [p for p in self.params() if id(p) in used])
        return loss

    @abstractmethod
    def _step(self, used: set[int]) -> set[Bucket]:
        """Step what got a gradient.

        Args:
            used: ids of the parameters that did.

        Returns:
            The buckets that this changes, on any rank.
        """

    # -- other rows -----------------------------------------------------------------------------------------------

    def check_row(self, row: StageRow) -> None:
        """Refuse a row of ``zero/stage`` that the optimizer cannot be stepped under.

        Raises:
            ConfigError: why not.
        """
        return

    def replanned(self) -> None:
        """Follow other plans of buckets."""
        self._around.pieces.clear()

    @abstractmethod
    def reload(self, bucket: Bucket, states: ParamStates) -> None:
        """Make the state of a bucket anew, in its new home."""

    # -- state ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def state_tensors(self, bucket: Bucket) -> Iterator[Tensor]:
        """Tensors of state, such that are not one for a whole parameter, that this rank holds for a bucket."""

    @abstractmethod
    def entries(self, bucket: Bucket, *, once: bool = False) -> dict[int, dict[str, Any]]:
        """By slot, the state of a bucket that this rank saves, with a :class:`Leaf` for each tensor.

        What there is once for a parameter (a step count) is that of the rank of its first element.

        Args:
            once: state of empty parameters is that of the first rank; else of all ranks that know of it.
        """

    @abstractmethod
    def parts(self, bucket: Bucket) -> Iterator[tuple[int, str, int, Sliced]]:
        """Slot, name, first element and values of a bucket's state that this rank saves. Its home may be closed."""

    @abstractmethod
    def gathered(self, bucket: Bucket, slots: Mapping[int, Sequence[Leaf]]) -> Iterator[tuple[int, Leaf, Tensor]]:
        """Slot, leaf and whole values of a bucket's state, on the device, one after the other. Collective.

        Args:
            slots: the leaves of each slot that are wanted; the same on all ranks.
        """

    def check_state(self, place: Place, state: Mapping[str, Any], what: str) -> None:
        """Refuse the state of a parameter that has other shapes than this optimizer keeps.

        Args:
            what: has it, in words.

        Raises:
            ConfigError: it has.
        """
        return

    @abstractmethod
    def has_stepped(self, bucket: Bucket) -> bool:
        """Whether the optimizer has stepped any of the bucket's parameters: the same on all ranks."""

    @abstractmethod
    def load_param_states(self, states: ParamStates, long_work: LongWork = SILENT) -> None:
        """Replace all state. ``states``: for a parameter, its full tensors or plain values."""

    # -- bytes ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def planned_state(self, bucket: Bucket) -> Iterator[int]:
        """Bytes of each tensor of state of a bucket that this rank has, where steps have been made."""

    @abstractmethod
    def state_to_come(self, tier: Tier) -> int:
        """Bytes that its state will take on ``tier`` on this rank, as far as that is known before the first step."""

    def states_per_element(self) -> int:
        """Tensors of state as large as the masters that its class keeps, where that is known; else 0."""
        return 0

    def whole_state(self, bucket: Bucket, plan: BucketPlan | None = None) -> int:
        """Bytes of state of a bucket's tensors that are stepped whole: that there are, or will be under ``plan``."""
        return 0

    def step_peak(self) -> int:
        """The most bytes that this rank holds beside its shards while they are stepped on the device."""
        return 0
