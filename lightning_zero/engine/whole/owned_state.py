"""The state of optimizers that step whole tensors, in the forms in which it is saved, loaded and moved.

A tensor's state is on the rank that owns it, of any shapes, in any nesting. Ranks tell each other what there is
(:class:`~lightning_zero.engine.steps.owned.Leaf` in the place of tensors); values are written by the owner from where
they rest, or sent to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_zero.engine.assembly import Assembly
from lightning_zero.engine.steps.optimizer import ShardedOptimizer
from lightning_zero.engine.steps.owned import Leaf, Owned, WholeEntry, WholeTensor, map_values
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.home import opened
from lightning_zero.optimizers.state_trees import map_leaves


def with_values(entry: WholeEntry, value_of: Callable[[Leaf], Any]) -> WholeEntry:
    """``entry`` with something in the place of each leaf."""
    found: WholeEntry = map_values(entry, lambda value: value_of(value) if isinstance(value, Leaf) else value)
    return found


def leaves_in(entry: WholeEntry) -> list[Leaf]:
    """In the order of the entry, which is one on all ranks."""
    found: list[Leaf] = []
    with_values(entry, found.append)
    return found


def all_who_have_what(engine: Assembly, sharded: ShardedOptimizer) -> dict[int, dict[int, WholeEntry]]:
    """By number of the bucket and slot: the state of each parameter on any rank. On all ranks.

    Of whole tensors it has a Leaf for each tensor.
    """
    own = {number: entries for number, bucket in enumerate(engine.buckets) if (entries := sharded.entries(bucket))}
    known: dict[int, dict[int, WholeEntry]] = {}
    for told in engine.comm.all_gather_objects(own, "optimizer state"):
        for number, slots in told.items():
            for slot, entry in slots.items():
                known.setdefault(number, {}).setdefault(slot, {}).update(entry)
    return known


def gathered_leaves(
    bucket: Bucket, owned: Owned, entries: Mapping[int, WholeEntry]
) -> Iterator[tuple[int, Leaf, Tensor]]:
    """Slot, leaf and values on the device, one after the other: on all ranks, for the same ``entries``, blocking."""
    with opened(bucket.home):
        own = {(tensor.info.slot, name): leaf for tensor, name, leaf in owned.leaves(bucket)}
        for slot, entry in sorted(entries.items()):
            tensor = owned.tensors.get((bucket, slot))
            if tensor is None:
                continue
            for leaf in leaves_in(entry):
                values = leaf.empty(bucket.comm.device)
                if tensor.is_here:
                    values.copy_(own[slot, leaf.name])
                if tensor.travels:
                    bucket.comm.broadcast(values, _first_holder(tensor))
                yield slot, leaf, values


def _first_holder(tensor: WholeTensor) -> int:
    """The owner, among all ranks; of several replicas that of the first."""
    return tensor.bucket.comm.topology.shard_groups[0][tensor.owner]


def full_entries(
    bucket: Bucket, owned: Owned, entries: Mapping[int, WholeEntry], change: Callable[[Tensor], Tensor]
) -> dict[int, WholeEntry]:
    """By slot, state with its tensors. On all ranks, for the same ``entries``.

    Args:
        change: makes of each tensor what is kept.
    """
    values = {(slot, leaf.name): change(value) for slot, leaf, value in gathered_leaves(bucket, owned, entries)}
    return {
        slot: with_values(entry, lambda leaf, slot=slot: values[slot, leaf.name])  # type: ignore[misc]
        for slot, entry in entries.items()
    }


def own_entries(bucket: Bucket, owned: Owned) -> dict[int, WholeEntry]:
    """By slot, state with its tensors, of the tensors that this rank owns."""
    return {t.info.slot: owned.state(t) for t in owned.here(bucket) if t.is_owner and owned.state(t)}


def tensors_to(value: Any, change: Callable[[str, Tensor], Any], plain: Callable[[Any], Any]) -> Any:
    """A copy of a state for a folder: ``change`` of its tensors, ``plain`` of what else there is.

    Lists stay lists where tensors are inside; elsewhere they are one value.
    """
    return _replaced(map_leaves(value, lambda name, leaf: _Changed(change(name, leaf))), plain)


class _Changed:
    def __init__(self, value: Any) -> None:
        self.value = value


def _replaced(value: Any, plain: Callable[[Any], Any]) -> Any:
    if isinstance(value, _Changed):
        return value.value
    if isinstance(value, Mapping):
        return {key: _replaced(item, plain) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and _holds_changed(value):
        return [_replaced(item, plain) for item in value]
    return plain(value)


def _holds_changed(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_changed, value))
    if isinstance(value, Mapping):
        return any(map(_holds_changed, value.values()))
    return isinstance(value, _Changed)
