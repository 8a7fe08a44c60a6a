"""Makes the user's optimizer step whole tensors, each on the rank that owns it.

For optimizers that need all of a tensor (Muon, Adafactor, Shampoo, SOAP, LAMB), and for classes that nothing is known
of. Masters and gradients stay flat shards; inside of a step they travel to owners (``windows.py``), and the class's own
``step`` gets tensors of the parameters' own shapes, as it does in one process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.comm.agreements import FailedElsewhereError
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.profiling import profiled
from lightning_zero.config import ConfigError
from lightning_zero.device import recording
from lightning_zero.engine.steps.interception import AroundStep, Stepping
from lightning_zero.engine.steps.optimizer import ShardedOptimizer
from lightning_zero.engine.steps.owned import Owned, WholeEntry, WholeTensor
from lightning_zero.engine.steps.runs import ParamStates, Runs
from lightning_zero.engine.steps.windows import Window, traveller_of
from lightning_zero.engine.torch_modes import without_autocast
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.kept import Sliced
from lightning_zero.optimizers.probe import probe
from lightning_zero.optimizers.trial import step_of
from lightning_zero.optimizers.windowed import Outcome, StepInParts, keep
from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.owners import (
    Route,
    Traveller,
    choose_owners,
    find_route,
    matrix_work,
    split_windows,
    step_peak,
)
from lightning_zero.planning.placement import Placement, StageRow, Tier
from lightning_zero.ranks.progress import SILENT, LongWork

_log = logging.getLogger(__name__)

MOST_ROUTES = 1000  # that are remembered
_PARTIAL = (
    "The step was partial: some tensors had been stepped when this was raised. Before training goes on, load the last "
    "checkpoint."
)
_FINE, _TELLS, _FAILED = range(3)  # how a step has ended on a rank


class WholeOptimizer(ShardedOptimizer):
    """Makes ``optimizer.step`` work on whole tensors, of which each rank steps some."""

    def __init__(
        self,
        optimizer: Optimizer,
        around: AroundStep,
        comm: Communicator,
        numbers: Mapping[Bucket, int],
        *,
        window_nbytes: int,
        unprobed: bool = False,
    ) -> None:
        """
        Args:
            numbers: of the buckets, in the order of units.
            window_nbytes: bytes of gradients that travel at a time.
            unprobed: an optimizer that cannot be tried is trusted.

        Raises:
            ConfigError: it cannot be stepped so.
        """
        self.optimizer = optimizer
        self._around, self._comm, self._numbers = around, comm, numbers
        self._device_type = comm.device.type
        self._stochastic, self._known = False, False
        self._window_nbytes = window_nbytes
        self._unprobed = unprobed
        self._try()
        self.runs = Runs(optimizer, per_fragment=True)  # none
        self.owned: Owned = Owned(optimizer)
        self._windows: list[list[WholeTensor]] = []
        self._arranged: list[tuple[int, int, int]] = []
        self._routes: dict[object, Route] = {}
        self._stepping = Stepping(optimizer, self.step)
        self._take_over_state()

    def release(self) -> None:
        self.owned.clear()
        super().release()

    def _take_over_state(self) -> None:
        """Move the state that the optimizer holds for parameters to the owners: of earlier steps, or of its making."""
        states = {
            (place.bucket, place.info.slot): self.optimizer.state.pop(place.info.param, {})
            for places in self.places()
            for place in places
        }
        self.load_param_states({key: state for key, state in states.items() if state})

    def load_param_states(self, states: ParamStates, long_work: LongWork = SILENT) -> None:
        for bucket, groups in self._group_of().items():
            if not bucket.trainable and any((bucket, slot) in states for slot in groups):
                bucket.make_trainable()
        self.owned.clear()
        self._arranged = []
        self._follow_groups()
        for bucket in long_work.items(self.owned.buckets(), "loading optimizer state, in buckets"):
            self.owned.fill(bucket, states, self.state_dtype)

    def reload(self, bucket: Bucket, states: ParamStates) -> None:
        self.owned.forget(bucket)
        self.owned.fill(bucket, states, lambda tensor, name: None)

    def state_dtype(self, tensor: WholeTensor, name: str) -> torch.dtype | None:
        """The dtype of a tensor of state, where the class was seen to make it."""
        shapes = self.probed.states.get((tensor.group, len(tensor.info.shape), tensor.bucket.dtypes.master), ())
        return next((shape.dtype for shape in shapes if shape.name == name), None)

    def _try(self) -> None:
        """Find out what the class does with its param groups of now.

        Raises:
            ConfigError: it cannot be stepped so.
        """
        place_of, of_torch = self._around.place_of, step_of(self.optimizer).__module__.startswith("torch.optim.")
        self.probed = probe(
            self.optimizer,
            lambda p: place_of(p).bucket.dtypes.master,
            self._comm.device,
            true_shapes=not of_torch,  # torch's classes (Muon, Adafactor) treat tensors of all sizes alike
        )
        self._probed_groups = len(self.optimizer.param_groups)
        if self.probed.untried and self._comm.rank == 0:
            shapes = ", ".join(map(str, sorted(self.probed.untried)))
            _log.warning(
                "zero.optimizer.whole: %s was not tried on tensors of these shapes: %s. They are too large, and it is "
                "taken to step each by itself, as it does with smaller ones.",
                type(self.optimizer).__qualname__,
                shapes,
            )
        if any(place.bucket.plan.shards_master for group in self.places() for place in group):
            self._check_probed()

    def check_row(self, row: StageRow) -> None:
        if row.master is Placement.sharded:
            self._check_probed()

    def replanned(self) -> None:
        self._arranged = []

    def _check_probed(self) -> None:
        """
        Raises:
            ConfigError: its tensors cannot be stepped apart, or that is not known.
        """
        kind, failed = type(self.optimizer).__qualname__, self.probed.failed
        if self.probed.couples:
            raise ConfigError(
                f"zero.optimizer.whole: what {kind} does to a tensor depends on the other tensors that it steps (a "
                "norm over all of them, say), on random numbers, or on what it notes outside of its param "
                "groups: tensors stepped together came out otherwise than each alone. Ranks step different "
                "tensors at stages 1 to 3. Use an optimizer that steps each tensor by itself, or choose "
                "zero/stage=zero0."
            )
        if failed is not None and not self._unprobed:
            raise ConfigError(
                f"zero.optimizer.whole: {kind} could not be tried, to see if it steps each tensor by itself: "
                f"{type(failed).__name__}: {failed}. If it does, set zero.optimizer.whole=true; else choose "
                "zero/stage=zero0."
            ) from failed

    def state_tensors(self, bucket: Bucket) -> Iterator[Tensor]:
        return (leaf for _, _, leaf in self.owned.leaves(bucket))

    def entries(self, bucket: Bucket) -> dict[int, WholeEntry]:
        return self.owned.entries(bucket)

    def parts(self, bucket: Bucket) -> Iterator[tuple[int, str, int, Sliced]]:
        return ((tensor.info.slot, name, 0, values) for tensor, name, _, values in self.owned.parts(bucket))

    def planned_state(self, bucket: Bucket) -> Iterator[int]:
        if self.owned.has_stepped(bucket):
            for tensor in self.owned.here(bucket):
                yield from self._state_nbytes(tensor)

    def whole_state_under(self, bucket: Bucket, plan: BucketPlan) -> int:
        return sum(
            sum(self._state_nbytes(tensor))
            for tensor in self.owned.tensors.values()
            if tensor.bucket is bucket and (tensor.is_owner or not plan.shards_master)
        )

    def _state_nbytes(self, tensor: WholeTensor) -> list[int]:
        """Of each tensor of state that a tensor will have, as small tensors were seen to have it."""
        shapes = self.probed.states.get((tensor.group, len(tensor.info.shape), tensor.bucket.dtypes.master), ())
        return [shape.nbytes(tensor.info.shape) for shape in shapes]

    def state_to_come(self, tier: Tier) -> int:
        return sum(
            sum(self._state_nbytes(tensor))
            for tensor in self.owned.tensors.values()
            if tensor.is_here and tensor.bucket.plan.tiers.master is tier
        )

    def step_peak(self) -> int:
        self._follow_groups()
        every = {id(tensor.info.param) for tensor in self.owned.tensors.values()}
        windows = [[t for t in window if t.travels] for window in self._windows]
        routes, values = [], []
        for window in filter(None, windows):
            buckets = list(dict.fromkeys(t.bucket for t in window))
            routes.append(self._find_route(buckets, [traveller_of(t, buckets, every) for t in window]))
            own = [t for t in window if t.is_owner]
            values.append(sum(t.info.numel * t.bucket.dtypes.master.itemsize for t in own))
        return step_peak(routes, values, values)

    # -- owners and windows -----------------------------------------------------------------------------------------

    def _follow_groups(self) -> None:
        """Give parameters that are new in the param groups, or trained since, an owner. Others keep theirs."""
        wanted = [
            WholeTensor(place.bucket, place.info, -1, group, number)
            for group, places in enumerate(self.places())
            for number, place in enumerate(places)
            if place.bucket.trainable
        ]
        wanted.sort(key=lambda t: (self._numbers[t.bucket], t.info.slot))
        arranged = [(self._numbers[t.bucket], t.info.slot, t.group) for t in wanted]
        if arranged == self._arranged:
            for tensor in wanted:
                self.owned.tensors[tensor.bucket, tensor.info.slot].place = tensor.place
            return
        if len(self.optimizer.param_groups) != self._probed_groups:
            self._try()
        known = [self.owned.tensors.get((t.bucket, t.info.slot)) for t in wanted]
        nbytes = [t.info.numel * t.bucket.dtypes.grad.itemsize for t in wanted]
        limit = self._window_nbytes
        if self.probed.couples or not any(t.travels or t.bucket.plan.home_tier is not Tier.device for t in wanted):
            limit = sys.maxsize  # nothing travels: one call, as in one process
        windows = split_windows(nbytes, [t.bucket.plan.unit for t in wanted], limit)
        costs = [matrix_work(t.info.shape) for t in wanted]
        owners = choose_owners(
            costs, windows, self._comm.shard_size, [t.owner if t is not None else None for t in known]
        )
        for tensor, owner in zip(wanted, owners, strict=True):
            tensor.owner = owner
        self.owned.take(wanted)
        tensors = [self.owned.tensors[t.bucket, t.info.slot] for t in wanted]
        self._windows = [[tensors[place] for place in window] for window in windows]
        self._arranged, self._routes = arranged, {}

    def _find_route(self, buckets: Sequence[Bucket], travellers: Sequence[Traveller]) -> Route:
        key = tuple(self._numbers[bucket] for bucket in buckets), tuple(travellers)
        if key not in self._routes:
            if len(self._routes) > MOST_ROUTES:  # other parameters have a gradient at each step
                self._routes.clear()
            layouts = [bucket.layout for bucket in buckets]
            self._routes[key] = find_route(travellers, layouts, self._comm.shard_rank)
        return self._routes[key]

    # -- step ---------------------------------------------------------------------------------------------------------

    def _step(self, used: set[int]) -> set[Bucket]:
        self._follow_groups()
        tensors = list(self.owned.tensors.values())
        # Where no tensor has a gradient, all are shown to the class without one: it may count the step.
        every = self.probed.steps_all or self.probed.couples or not any(id(t.info.param) in used for t in tensors)
        changed = {t.bucket for t in tensors if every or id(t.info.param) in used}
        listed = [[tensor for tensor in window if tensor.bucket in changed] for window in self._windows]
        windows = [Window(window, used, self.owned, self._comm, self._find_route) for window in listed if window]
        for place, window in enumerate(windows):
            window.completes.difference_update(*(later.buckets for later in windows[place + 1 :]))
        # Hooks of the user's run once, around all windows, and find the parameters in the param groups.
        hooked: Callable[[Optimizer], Any] = Optimizer.profile_hook_step(lambda _: self._step_windows(windows))
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_autocast(self._device_type),
            profiled("step", f"{len(changed)} buckets"),
            recording.span("step", f"{len(changed)} buckets"),
        ):
            hooked(self.optimizer)
        self.optimizer.__dict__["_opt_called"] = True  # what a scheduler looks for
        self.owned.stepped(tensor for window in listed for tensor in window)
        return changed

    def _step_windows(self, windows: Sequence[Window]) -> None:
        error: Exception | None = None
        before: list[Window] = []
        with StepInParts(self.optimizer, step_of(self.optimizer), hides_empty=self.probed.hides_empty) as parts:
            for place, window in enumerate(windows):
                following = windows[place + 1] if place + 1 < len(windows) else None
                if not place:
                    window.open()
                    window.send()
                if following is not None:
                    following.begin_open()
                window.arrive()
                for last in before:
                    error = last.land() or error
                if following is not None:
                    following.open()
                    following.send()
                try:
                    if error is None and window.here:
                        parts.call(self._lists(window))
                except Exception as raised:
                    # The other ranks wait for the messages of this one. All raise when all windows are over.
                    error = raised
                window.send_back()
                for last in before:
                    last.settle()
                before = [window]
            for last in before:
                error = last.land() or error
                last.settle()
        self._agree(parts.outcome, error)

    def _lists(self, window: Window) -> list[list[tuple[int, Tensor]]]:
        """Of each param group the tensors of a window that this rank steps, in the group's order."""
        lists: list[list[tuple[int, Tensor]]] = [[] for _ in self.optimizer.param_groups]
        for tensor in sorted(window.here, key=lambda tensor: tensor.place):
            lists[tensor.group].append((tensor.place, tensor.key))
        return lists

    def _agree(self, outcome: Outcome, error: Exception | None) -> None:
        """Raise on all ranks what was raised on one, and have what is kept for a group on all.

        Raises:
            Exception: what the step of this rank has raised.
            FailedElsewhereError: it was raised on another one.
        """
        outcomes = [outcome]
        if any(tensor.travels for tensor in self.owned.tensors.values()):
            own = _FAILED if error is not None else _TELLS if outcome.is_there else _FINE
            most = int(self._comm.max_(torch.tensor([own], dtype=torch.uint8)))
            what = "the step of an optimizer"
            if most == _FAILED:
                told = None if error is None else f"{type(error).__name__}: {error}"
                found = self._comm.all_gather_objects(told, what)
                if error is None:
                    rank, text = next((rank, text) for rank, text in enumerate(found) if text is not None)
                    error = FailedElsewhereError(f"rank {rank} failed with {text}")
            elif most == _TELLS:
                outcomes = self._comm.all_gather_objects(outcome, what)
        if error is not None:
            error.add_note(_PARTIAL)
            raise error
        keep(self.optimizer, outcomes)
