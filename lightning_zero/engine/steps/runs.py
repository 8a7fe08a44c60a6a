"""Runs: the flat slices of the masters that an optimizer steps, and their state.

A run holds adjacent parts of parameters that have the same param group and step count. Runs are cut again when groups
or counts change; elements keep their state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.master_storage import FlatSlice, opened
from lightning_zero.optimizers.known import PER_TENSOR, base_of, is_elementwise, is_per_tensor
from lightning_zero.optimizers.low_bits import STORE_CHUNK
from lightning_zero.optimizers.state_trees import Saved, State
from lightning_zero.planning.layout import Fragment, Run, cut_runs
from lightning_zero.ranks.progress import LongWork

_log = logging.getLogger(__name__)

LEFT = -1  # the param group of parameters that are in none any more
ParamStates = Mapping[tuple[Bucket, int], Saved]  # state of the parameter at a slot of a bucket


class FlatRun(NamedTuple):
    bucket: Bucket
    run: Run
    tensor: Tensor  # [run.stop - run.start], a slice of bucket.master


class Cut(NamedTuple):
    """Records what the cuts of a bucket into runs depend on: the param group of each slot, the stepped slots (None:
    all), and the tensor of masters."""

    groups: dict[int, int]
    active: set[int] | None
    master: Tensor


@dataclass(eq=False)
class Runs:
    """Holds one optimizer's runs in all buckets and each parameter's step count. Cuts buckets into runs, and moves
    optimizer state to new runs."""

    optimizer: Optimizer  # holds the state, keyed by the runs' tensors
    per_fragment: bool  # every fragment is a run of its own
    narrow: Sequence[str]  # names of states that rest in bf16 beside wider masters
    rounded: bool = False  # whether the last load rounded values
    _steps: dict[tuple[Bucket, int], int] = field(default_factory=dict)  # step count of a parameter
    _runs: dict[Bucket, list[tuple[int, FlatRun]]] = field(default_factory=dict)  # (param group, run), in order
    _cuts: dict[Bucket, Cut] = field(default_factory=dict)

    def runs_of(self, bucket: Bucket) -> list[FlatRun]:
        return [run for _, run in self.grouped(bucket)]

    def grouped(self, bucket: Bucket) -> Sequence[tuple[int, FlatRun]]:
        """Return (index of the param group, run) for each run of the bucket; empty if this rank owns no element. The
        index is ``LEFT`` for parameters that were removed from all param groups, whose state is kept."""
        return self._runs.get(bucket, [])

    def buckets(self) -> list[Bucket]:
        return [bucket for bucket, runs in self._runs.items() if runs]

    def step_count(self, run: FlatRun) -> int:
        return self._steps[run.bucket, run.run.fragments[0].index]

    def attach_state(self, bucket: Bucket) -> None:
        """Pass the bucket's state tensors to its open storage, which moves the tensors to the tier of the masters."""
        if not bucket.storage.keeps_state:
            return
        states = [
            value
            for run in self.runs_of(bucket)
            for name, value in self.optimizer.state.get(run.tensor, {}).items()
            if is_elementwise(self.optimizer, name, value, run.tensor)
        ]
        bucket.storage.attach_state(self, states)

    def drop(self, bucket: Bucket) -> None:
        """Drop the runs and the optimizer state of a bucket. The bucket keeps its storage."""
        self.forget(bucket)
        with opened(bucket.storage):
            bucket.storage.attach_state(self, [])

    # -- cutting --------------------------------------------------------------------------------------------------

    def advance(self, bucket: Bucket, groups: dict[int, int], active: set[int]) -> None:
        """Cut a bucket into runs for a step of the slots in `active`, and increment the step counts of these slots.
        `groups`: slot -> index of the param group."""
        cut = self._cuts.get(bucket)
        # While these stay the same, step counts of two parameters stay equal or stay different, and so do the runs.
        if cut is None or cut[:2] != (groups, active) or cut.master is not bucket.storage.master:
            self.cut(bucket, groups, active)
        for slot in active:
            self._steps[bucket, slot] = self._steps.get((bucket, slot), 0) + 1

    def cut(self, bucket: Bucket, groups: dict[int, int], active: set[int] | None = None) -> None:
        """Cut a bucket into runs by param group, step count and membership in `active` (None: all slots). Copy existing
        state to the new runs."""
        present, wanted = self._runs.get(bucket, []), self._wanted(bucket, groups, active)
        before, cut = self._cuts.get(bucket), Cut(groups, active, bucket.master)
        # Runs are tuples of integers: `==` finds changed cuts.
        if [(g, r.run) for g, r in present] == wanted and before is not None and before.master is bucket.master:
            self._cuts[bucket] = cut
            return
        # In files, state has memory to be copied from only while the storage is open.
        with opened(bucket.storage):
            runs: list[tuple[int, FlatRun]] = []
            for group, run in wanted:
                stop = run.fragments[-1].start + run.fragments[-1].numel if self.per_fragment else run.stop
                tensor = bucket.master[run.start : stop].detach()
                runs.append((group, FlatRun(bucket, run, tensor)))
            self._hand_over(present, runs)
            self._runs[bucket], self._cuts[bucket] = runs, cut
            self.attach_state(bucket)

    def _wanted(self, bucket: Bucket, groups: dict[int, int], active: set[int] | None) -> list[tuple[int, Run]]:
        fragments = bucket.owned_fragments()
        keys: list[object] = []
        for fragment in fragments:
            slot = fragment.index
            group, steps = groups.get(slot, LEFT), self._steps.get((bucket, slot), 0)
            apart = self.per_fragment or group == LEFT or base_of(self.optimizer) in PER_TENSOR
            used_now = active is None or slot in active
            keys.append((group, steps, used_now, slot if apart else -1) if group != LEFT or steps else None)
        return [(key[0], run) for key, run in cut_runs(fragments, keys)]  # type: ignore[index]

    def _hand_over(self, old: Sequence[tuple[int, FlatRun]], new: Sequence[tuple[int, FlatRun]]) -> None:
        states = {id(r): self.optimizer.state.pop(r.tensor, {}) for _, r in old}
        for _, target in new:
            pieces = []
            for _, source in old:
                low, high = max(source.run.start, target.run.start), min(source.run.stop, target.run.stop)
                if low < high and states[id(source)]:
                    pieces.append((low, high, source))
            if pieces:
                self.optimizer.state[target.tensor] = self._assemble(pieces, target, states)

    def _assemble(self, pieces: Sequence[tuple[int, int, FlatRun]], target: FlatRun, states: dict[int, State]) -> State:
        low, high, first = pieces[0]
        result: State = {}
        for name, value in states[id(first)].items():
            if not is_elementwise(self.optimizer, name, value, first.tensor):
                result[name] = _beside(value, first.tensor, target.tensor)
                continue
            result[name] = torch.zeros_like(target.tensor, dtype=value.dtype)
            for low, high, source in pieces:
                part = states[id(source)][name][low - source.run.start : high - source.run.start]
                result[name][low - target.run.start : high - target.run.start].copy_(part)
        return result

    # -- another plan of the bucket ---------------------------------------------------------------------------------

    def has_stepped(self, bucket: Bucket) -> bool:
        return any((bucket, info.slot) in self._steps for info in bucket.params)

    def forget(self, bucket: Bucket) -> None:
        """Drop the runs and the optimizer state of a bucket whose storage has been replaced."""
        self._cuts.pop(bucket, None)
        for _, run in self._runs.pop(bucket, []):
            self.optimizer.state.pop(run.tensor, None)

    def reload(self, bucket: Bucket, groups: dict[int, int], states: ParamStates) -> None:
        """Cut a bucket's new owned range into runs, and fill their state from the whole tensors in ``states``."""
        for _, run in self.grouped(bucket):
            self.optimizer.state.pop(run.tensor, None)
        self._runs[bucket] = []
        self.cut(bucket, groups)
        self._fill(bucket, states, None)

    # -- state, keyed by parameter ----------------------------------------------------------------------------------

    def fragment_states(self, bucket: Bucket) -> Iterator[tuple[Fragment, State]]:
        """Yield (fragment, state) of each fragment on this rank, with element-wise state as :class:`FlatSlice`."""
        for run in self.runs_of(bucket):
            for fragment in run.run.fragments if self.optimizer.state.get(run.tensor) else ():
                yield fragment, self._sliced(run, fragment.start - run.run.start, fragment.numel)
        # Empty parameters lie in no run. A plain optimizer counts their steps and keeps empty tensors. So slice the
        # state of a run with equally many steps.
        for info in bucket.params:
            steps = self._steps.get((bucket, info.slot), 0) if not info.numel else 0
            with_state = (run for of in self._runs.values() for _, run in of if self.optimizer.state.get(run.tensor))
            alike = next((run for run in with_state if self.step_count(run) == steps), None) if steps else None
            if alike is not None:
                yield Fragment(info.slot, 0, 0, 0, 0), self._sliced(alike, 0, 0)

    def _sliced(self, run: FlatRun, start: int, numel: int) -> State:
        return {
            name: FlatSlice(value, start, numel) if is_elementwise(self.optimizer, name, value, run.tensor) else value
            for name, value in self.optimizer.state[run.tensor].items()
        }

    def load(self, states: ParamStates, groups_of: Mapping[Bucket, dict[int, int]], long_work: LongWork) -> None:
        """Replace all optimizer state by this rank's part of `states`, which has whole tensors and plain values.
        Existing tensors for the same elements are reused, so that memory never holds both old and new state."""
        self._steps = {key: steps_in(state) for key, state in states.items()}
        for bucket, groups in groups_of.items():
            if not bucket.plan.trainable and any((bucket, slot) in states for slot in groups):
                bucket.make_trainable()  # a fine-tuning callback thawed it before the save, and will again
        kept = [bucket for bucket in groups_of if bucket.plan.trainable]
        for bucket in self.buckets():
            present = [(group, run.run) for group, run in self.grouped(bucket)]
            if bucket not in kept or present != self._wanted(bucket, groups_of[bucket], None):
                self.drop(bucket)
        for bucket in kept:
            self.cut(bucket, groups_of[bucket])
        self.rounded = False
        held = {run.tensor: self.optimizer.state.get(run.tensor, {}) for b in kept for run in self.runs_of(b)}
        self.optimizer.state.clear()
        for bucket in long_work.items(kept, "loading optimizer state, in buckets"):
            self._fill(bucket, states, held)
        if self.rounded:
            _log.info(
                "zero.optimizer.state_dtype=bf16: the optimizer state that was loaded is wider, and was rounded to "
                "nearest."
            )

    def _fill(self, bucket: Bucket, states: ParamStates, held: dict[Tensor, State] | None) -> None:
        """Fill the runs' state. ``held``: state tensors to reuse; None: ``states`` are in the optimizer's dtypes."""
        with opened(bucket.storage, changed=True):
            for run in self.runs_of(bucket):
                self._fill_state(run, states, None if held is None else held.pop(run.tensor, {}))
            self.attach_state(bucket)

    def _fill_state(self, run: FlatRun, states: ParamStates, held: Saved | None) -> None:
        first = states.get((run.bucket, run.run.fragments[0].index))
        if not first:
            return
        state: State = {}
        old = held or {}
        shape = run.bucket.params[run.run.fragments[0].index].shape
        for name, value in first.items():
            if is_per_tensor(self.optimizer, name) or not isinstance(value, Tensor) or value.shape != shape:
                # Fused kernels need the step count on the run's device.
                if isinstance(value, int | float) and base_of(self.optimizer) and is_per_tensor(self.optimizer, name):
                    value = torch.tensor(float(value))  # as torch's load of what old versions have saved
                state[name] = value.to(run.tensor.device, copy=True) if isinstance(value, Tensor) else value
                continue
            if name in self.narrow:
                dtype = torch.bfloat16
            else:
                dtype = run.tensor.dtype if value.is_floating_point() and held is not None else value.dtype
            state[name] = flat = _zeros(run.tensor, dtype, old.get(name))
            for fragment in run.run.fragments:
                info, whole = run.bucket.params[fragment.index], states[run.bucket, fragment.index][name]
                target = flat[fragment.start - run.run.start :][: fragment.numel]
                if name not in self.narrow:
                    info.copy_part(whole, fragment.offset, target)
                    continue
                for low in range(0, fragment.numel, STORE_CHUNK):
                    place = target[low : low + STORE_CHUNK]
                    values = torch.empty_like(place, dtype=torch.float32)
                    info.copy_part(whole, fragment.offset + low, values)
                    place.copy_(values)
                    self.rounded |= not torch.equal(place.float().nan_to_num_(), values.nan_to_num_())
        self.optimizer.state[run.tensor] = state


def _beside(value: object, source: Tensor, target: Tensor) -> object:
    """Return a copy of a state value that is not element-wise (a step count). If the value is a tensor on the device of
    `source`, the copy is on the device of `target`."""
    if not isinstance(value, Tensor):
        return value
    moves = value.device == source.device != target.device
    return value.to(target.device, copy=True) if moves else value.clone()


def _zeros(like: Tensor, dtype: torch.dtype, held: object) -> Tensor:
    if isinstance(held, Tensor) and (held.shape, held.dtype, held.device) == (like.shape, dtype, like.device):
        return held.zero_()
    return torch.zeros(like.numel(), dtype=dtype, device=like.device)


def steps_in(state: Saved) -> int:
    """Return the step count in a parameter's state. Without a count (SGD) return 1 if there is any state, else 0."""
    step = state.get("step", 1 if state else 0)
    return int(step.item()) if isinstance(step, Tensor) else int(step or 0)
