"""What comes before and after a step, and what the engine asks of whatever steps its shards for an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.passes.access import Writes
from lightning_zero.engine.passes.gradient_sentinels import Sentinels
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.steps.interception import Stepping
from lightning_zero.engine.steps.runs import ParamStates
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.after_step import AfterStep, StepJob
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.kept import Sliced
from lightning_zero.engine.units.param import values_changed
from lightning_zero.engine.units.unit import Unit
from lightning_zero.optimizers.low_bits import PieceMemory
from lightning_zero.optimizers.state_trees import Leaf
from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.placement import StageRow, Tier
from lightning_zero.ranks.progress import SILENT, LongWork


class AroundStep:
    """Prepares and follows the steps of all optimizers of one engine. A step calls the methods in their order here.

    Args:
        place_of: finds a parameter's bucket; raises for parameters that the engine does not own.
        stepped: called behind every step, on all ranks.

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
        sentinels: Sentinels,
        writes: Writes,
        after_step: AfterStep,
        stepped: Callable[[], None],
    ) -> None:
        self._units = units
        self.place_of = place_of
        self._passes = passes
        self._reducer = reducer
        self._sentinels = sentinels
        self._writes = writes
        self._after_step = after_step
        self._stepped = stepped
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
        self._sentinels.forget_zeroed()
        # Before masters change: taken over afterwards, a write would be set against values of after the step.
        self._writes.take_all_over()
        self._reducer.refuse_unreduced(map(self.place_of, params))

    @property
    def looks_at_gradients(self) -> bool:
        """Whether gradients are only looked at, and a step has none."""
        return self._passes.look is not None

    def used(self) -> set[int]:
        """Ids of the parameters that any rank gave a gradient since it was cleared."""
        return self._sentinels.used_params()

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
        self._stepped()

    def masters_changed(self, changed: set[Bucket]) -> None:
        """Bring replicated compute parameters up to date by gathers, unit by unit. On all ranks.

        The next forward waits for these gathers. In an open pass those of the root are waited for here.
        """
        self._after_step.masters_changed(changed)
        if self._passes.key is not None:
            self._after_step.refresh(self._units[0])
            self._units[0].unshard_wait()


class Stepper(ABC):
    """Makes ``optimizer.step`` step the shards of an engine.

    Attributes:
        optimizer: the user's object, patched.
    """

    def __init__(self, optimizer: Optimizer, around: AroundStep) -> None:
        self.optimizer = optimizer
        self._around = around

    def _patch(self) -> None:
        """Lead the optimizer's ``step`` to this object, once it is known that it can be stepped."""
        self._stepping = Stepping(self.optimizer, self.step)

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
