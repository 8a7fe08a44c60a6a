"""Plan each rank's optimizer state if optimizers step whole tensors. Owners are chosen as in ``owners.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.memory import StateOfRank
from lightning_zero.planning.owners import MessageBytes, choose_owners, split_messages, step_peak
from lightning_zero.planning.placement import Tier


class TensorState(NamedTuple):
    """The optimizer state of one parameter."""

    optimizer: int = -1  # index of the optimizer that steps it whole; -1: none
    work: int = 0  # cost of its step, by owners.matrix_work
    nbytes: tuple[int, ...] = ()  # of each state tensor, if it is stepped whole
    slices: int = 0  # how many element-wise state tensors, if it is stepped in slices


class _Tensor(NamedTuple):
    bucket: int
    slot: int
    state: TensorState


@dataclass(frozen=True)
class TensorStates:
    """The optimizer state of all parameters of a model."""

    tensors: tuple[tuple[TensorState, ...], ...]  # by bucket and parameter
    message_nbytes: int  # bytes of gradients sent at a time
    _owners: dict[tuple[int, int], list[int]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the state of all tensors that are stepped whole."""
        return sum(sum(state.nbytes) for states in self.tensors for state in states)

    def of_fullest_rank(self, buckets: Sequence[BucketPlan], *, has_link: bool = False) -> StateOfRank:
        """Return the optimizer state of the rank that has most, and the bytes that it needs beside its shards during a
        step. ``has_link``: the device is not the host, so masters and state on other tiers are copied to it for the
        step."""
        ranks = max((bucket.layout.world_size for bucket in buckets), default=1)
        by_optimizer: dict[int, list[_Tensor]] = {}
        for number, (bucket, states) in enumerate(zip(buckets, self.tensors, strict=True)):
            for slot, state in enumerate(states):
                if bucket.trainable and state.optimizer >= 0:
                    by_optimizer.setdefault(state.optimizer, []).append(_Tensor(number, slot, state))
        held = [0] * ranks
        for optimizer, tensors in by_optimizer.items():
            for tensor, owner in zip(tensors, self._owners_of(optimizer, tensors, ranks), strict=True):
                held[owner] += sum(tensor.state.nbytes) * buckets[tensor.bucket].shards_master
        fullest = max(range(ranks), key=held.__getitem__)
        found = [_by_slices(bucket, states) for bucket, states in zip(buckets, self.tensors, strict=True)]
        peak = 0
        for optimizer, tensors in by_optimizer.items():
            sizes = []
            for tensor, owner in zip(tensors, self._owners_of(optimizer, tensors, ranks), strict=True):
                bucket = buckets[tensor.bucket]
                is_here = owner == fullest or not bucket.shards_master
                if is_here:
                    found[tensor.bucket].extend(tensor.state.nbytes)
                sizes.append(_message(tensor, bucket, is_here=is_here, has_link=has_link))
            grads = [buckets[t.bucket].layout.slots[t.slot].numel * buckets[t.bucket].itemsizes.grad for t in tensors]
            units = [buckets[tensor.bucket].unit for tensor in tensors]
            messages = split_messages(grads, units, self.message_nbytes)
            together = [zip(*(sizes[place] for place in message), strict=True) for message in messages]
            peak = max(peak, step_peak([MessageBytes(*map(sum, columns)) for columns in together]))
        return StateOfRank(tuple(map(tuple, found)), peak)

    def _owners_of(self, optimizer: int, tensors: Sequence[_Tensor], ranks: int) -> list[int]:
        if (optimizer, ranks) not in self._owners:
            costs = [tensor.state.work for tensor in tensors]
            self._owners[optimizer, ranks] = choose_owners(costs, ranks, [None] * len(tensors))
        return self._owners[optimizer, ranks]


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


def _message(tensor: _Tensor, bucket: BucketPlan, *, is_here: bool, has_link: bool) -> MessageBytes:
    """Estimate a rank's bytes for one tensor's messages and step, as if all ranks held equal parts of the tensor.
    ``is_here``: the rank steps the tensor. ``has_link``: see :meth:`TensorStates.of_fullest_rank`."""
    ranks = bucket.layout.world_size
    travels, from_host = bucket.shards_master and ranks > 1, has_link and bucket.storage_tier is not Tier.device
    numel = bucket.layout.slots[tensor.slot].numel
    master, grad = numel * bucket.itemsizes.master, numel * bucket.itemsizes.grad
    if is_here and (travels or from_host):
        rest = (ranks - 1) * travels
        arriving, back = (master + grad) * rest // ranks, master * rest // ranks
        values = master + from_host * sum(tensor.state.nbytes)
        return MessageBytes(arriving, arriving, back, values, master)
    return MessageBytes((master + grad) // ranks * travels, 0, master // ranks * travels)
