"""Plan each rank's optimizer state if optimizers step whole tensors. Owners are chosen as in ``owners.py``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.memory import StateOfRank
from lightning_zero.planning.owners import WindowBytes, choose_owners, peak_of_windows, split_windows
from lightning_zero.planning.placement import Tier


class TensorState(NamedTuple):
    """The optimizer state of one parameter."""

    optimizer: int = -1  # number of the optimizer that steps it whole; -1: none
    work: int = 0  # cost of its step, by owners.matrix_work
    nbytes: tuple[int, ...] = ()  # of each state tensor, if it is stepped whole
    slices: int = 0  # number of element-wise state tensors, if it is stepped in slices


class _Tensor(NamedTuple):
    bucket: int
    slot: int
    state: TensorState


@dataclass(frozen=True)
class TensorStates:
    """The optimizer state of all parameters of a model."""

    tensors: tuple[tuple[TensorState, ...], ...]  # by bucket and parameter
    window_nbytes: int  # bytes of gradients sent per window
    _owners: dict[tuple[int, int, int], list[int]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the state of all tensors that are stepped whole."""
        return sum(sum(state.nbytes) for states in self.tensors for state in states)

    def of_fullest_rank(self, buckets: Sequence[BucketPlan]) -> StateOfRank:
        """Return the optimizer state of the rank that holds most, and its bytes beside the shards during a step."""
        ranks = max((bucket.layout.world_size for bucket in buckets), default=1)
        by_optimizer: dict[int, list[_Tensor]] = {}
        for number, (bucket, states) in enumerate(zip(buckets, self.tensors, strict=True)):
            for slot, state in enumerate(states):
                if bucket.trainable and state.optimizer >= 0:
                    by_optimizer.setdefault(state.optimizer, []).append(_Tensor(number, slot, state))
        held = [0] * ranks
        stepped = []
        for optimizer, tensors in by_optimizer.items():
            windows, owners = self._arrange(optimizer, tensors, buckets, ranks)
            stepped.append((tensors, windows, owners))
            for tensor, owner in zip(tensors, owners, strict=True):
                held[owner] += sum(tensor.state.nbytes) * buckets[tensor.bucket].shards_master
        fullest = max(range(ranks), key=held.__getitem__)
        found = [_by_slices(bucket, states) for bucket, states in zip(buckets, self.tensors, strict=True)]
        peak = 0
        for tensors, windows, owners in stepped:
            for tensor, owner in zip(tensors, owners, strict=True):
                if owner == fullest or not buckets[tensor.bucket].shards_master:
                    found[tensor.bucket].extend(tensor.state.nbytes)
            parts = [_window([tensors[p] for p in w], [owners[p] == fullest for p in w], buckets) for w in windows]
            peak = max(peak, peak_of_windows(parts))
        return StateOfRank(tuple(map(tuple, found)), peak)

    def _arrange(
        self, optimizer: int, tensors: Sequence[_Tensor], buckets: Sequence[BucketPlan], ranks: int
    ) -> tuple[list[list[int]], list[int]]:
        """Divide an optimizer's tensors into windows (lists of indices) and choose each tensor's owner. Return both."""
        plans = [buckets[tensor.bucket] for tensor in tensors]
        sizes = [b.layout.slots[t.slot].numel * b.itemsizes.grad for b, t in zip(plans, tensors, strict=True)]
        moves = any((b.shards_master and ranks > 1) or b.tiers.master is not Tier.device for b in plans)
        limit = self.window_nbytes if moves else sys.maxsize
        windows = split_windows(sizes, [plan.unit for plan in plans], limit)
        key = optimizer, ranks, limit
        if key not in self._owners:
            none = [None] * len(tensors)
            self._owners[key] = choose_owners([t.state.work for t in tensors], windows, ranks, none)
        return windows, self._owners[key]


def _by_slices(bucket: BucketPlan, states: Sequence[TensorState]) -> list[int]:
    """Return for each element-wise state tensor of ``bucket`` an upper bound of its bytes on one rank."""
    if not bucket.trainable:
        return []
    starts = [slot.start for slot in bucket.layout.slots]
    numels = [stop - start for start, stop in zip(starts, [*starts[1:], bucket.layout.used_numel], strict=True)]
    counts = [state.slices for state in states]
    sliced = sum(numel for numel, count in zip(numels, counts, strict=True) if count)
    numel = bucket.state_numel(0) if all(counts) else min(bucket.state_numel(0), sliced)
    return [bucket.state_nbytes(numel)] * max(counts, default=0) if numel else []


def _window(tensors: Sequence[_Tensor], own: Sequence[bool], buckets: Sequence[BucketPlan]) -> WindowBytes:
    """Estimate a rank's bytes in a window if ranks hold equal parts of each tensor. ``own``: whether it owns each."""
    there = arriving = back = tensors_nbytes = values = 0
    for tensor, is_own in zip(tensors, own, strict=True):
        bucket = buckets[tensor.bucket]
        ranks = bucket.layout.world_size
        if not bucket.shards_master or ranks == 1:
            continue
        master = bucket.layout.slots[tensor.slot].numel * bucket.itemsizes.master
        grad = bucket.layout.slots[tensor.slot].numel * bucket.itemsizes.grad
        if is_own:
            arriving += (master + grad) * (ranks - 1) // ranks
            back += master * (ranks - 1) // ranks
            tensors_nbytes += 2 * master
            values += master
        else:
            there += (master + grad) // ranks
            back += master // ranks
    return WindowBytes(there + arriving, arriving, back, tensors_nbytes, values)
