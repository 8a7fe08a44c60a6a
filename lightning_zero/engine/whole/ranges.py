"""Whole values without anybody who holds them: tensors without memory stand for them, and each rank has its ranges."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.assembly import Assembly
from lightning_zero.engine.steps.optimizer import ShardedOptimizer
from lightning_zero.engine.steps.owned import Leaf
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.home import Home, opened
from lightning_zero.engine.units.kept import Sliced
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.engine.whole.owned_state import all_who_have_what, gathered_leaves

MASTER = ""  # the name of a parameter's own values
COPY = -1  # in the place of an optimizer: a copy of the masters, which somebody else keeps


class Value(NamedTuple):
    """A value of a parameter: its own, one of the states that an optimizer keeps for it, or a copy.

    It is of the parameter's shape, but for state of optimizers that step whole tensors.
    """

    bucket: int
    slot: int
    optimizer: int = 0
    name: str = MASTER


class Hollow:
    """Makes tensors that have shape and dtype, and no values: reading one raises.

    Args:
        last: gives those again that it has made, as making one takes a tenth of a millisecond. It is of no use then.

    Attributes:
        made: each of them with what it stands for.
        copies: of the masters of all buckets, each in a home; by name.
    """

    def __init__(self, last: Hollow | None = None) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode: Any = last._mode if last is not None else FakeTensorMode()
        self._kept = {(value, made.dtype): made for value, made in last.made} if last is not None else {}
        self.made: list[tuple[Value, Tensor]] = []
        self.copies: dict[str, Sequence[Home]] = {}

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy of what has saved begins anew

    def tensor(self, value: Value, like: ParamInfo | Leaf, dtype: torch.dtype) -> Tensor:
        """A tensor for ``value``, with shape and strides of ``like``: those of a parameter in its flat buffer, say."""
        made = self._kept.pop((value, dtype), None)
        if made is None or (made.shape, made.stride()) != (like.shape, like.strides):
            with self._mode:
                made = torch.empty_strided(like.shape, like.strides, dtype=dtype, device="cpu")
        self.made.append((value, made))
        return made


Copies = Mapping[str, Sequence[Home]]


class Range(NamedTuple):
    """Elements of a value, as they lie in the memory of a tensor of the parameter's strides."""

    value: Value
    start: int
    values: Tensor  # [n], wherever they rest; to be read before the next one is asked for


class OwnPart(NamedTuple):
    """A :class:`Range` whose values are still where they rest."""

    value: Value
    start: int
    values: Sliced


def own_ranges(engine: Assembly, wanted: Container[Value], copies: Copies) -> Iterator[Range]:
    """What this rank is to give of ``wanted``: together the ranks give every element once.

    No message is sent. What rests in files is in memory a bucket at a time.
    """
    for home, parts in own_parts(engine, wanted, copies):
        with opened(home):
            for value, start, part in parts:
                yield Range(value, start, part.tensor)


def own_parts(engine: Assembly, wanted: Container[Value], copies: Copies) -> Iterator[tuple[Home, list[OwnPart]]]:
    """Where that is: each home once, if it has any of it."""
    if engine.comm.replica:  # another node has the same
        return
    for number, bucket in enumerate(engine.buckets):
        found = list(_of_masters(bucket, number, bucket.home, {}))
        for index, sharded in enumerate(engine.optimizers):
            for slot, name, start, values in sharded.parts(bucket):
                found.append(OwnPart(Value(number, slot, index, name), start, values))
        by_home = [(bucket.home, found)]
        for name, homes in copies.items():
            kind = {"optimizer": COPY, "name": name}
            by_home.append((homes[number], list(_of_masters(bucket, number, homes[number], kind))))
        for home, parts in by_home:
            if parts := [part for part in parts if part.value in wanted]:
                yield home, parts


def _of_masters(bucket: Bucket, number: int, home: Home, kind: Mapping[str, Any]) -> Iterator[OwnPart]:
    for fragment in bucket.owned_fragments():
        if (part := fragment.within(bucket.own_shard_of_owned)) is not None:
            start, low, high = part
            yield OwnPart(
                Value(number, fragment.index, **kind), start, Sliced(home.master, fragment.start + low, high - low)
            )


def gathered_ranges(engine: Assembly, wanted: Mapping[Value, torch.dtype], copies: Copies) -> Iterator[Range]:
    """All of ``wanted``, each value in one range, a bucket at a time: on all ranks, which gather it.

    Args:
        wanted: the same on all ranks, with the dtype of each.
    """
    owned = {index: sharded.owned for index, sharded in enumerate(engine.optimizers) if sharded.owned is not None}
    told = {index: all_who_have_what(engine, engine.optimizers[index]) for index in owned}
    for number, bucket in enumerate(engine.buckets):
        for index, entries in told.items():
            for slot, leaf, values in gathered_leaves(bucket, owned[index], entries.get(number, {})):
                value = Value(number, slot, index, leaf.name)
                if value in wanted:
                    yield Range(value, 0, values.as_strided((leaf.numel,), (1,)))
        dtypes = {
            (v.optimizer, v.name): dtype
            for v, dtype in wanted.items()
            if v.bucket == number and (v.name == MASTER or v.optimizer not in told)
        }
        for index, name in sorted(dtypes):
            if name == MASTER:
                full = bucket.full_master()
            elif index == COPY:
                copy = copies[name][number].master
                full = full_state(bucket, copy.dtype, [(0, copy.numel(), copy)])
            else:
                with opened(bucket.home):
                    parts = local_parts(bucket, engine.optimizers[index])
                    full = full_state(bucket, dtypes[index, name], parts.get(name, []))
            for info in bucket.params:
                value = Value(number, info.slot, index, name)
                if value in wanted:
                    start = bucket.layout.slots[info.slot].start
                    yield Range(value, 0, full[start : start + info.numel])


def local_parts(bucket: Bucket, sharded: ShardedOptimizer) -> dict[str, list[tuple[int, int, Tensor]]]:
    """This rank's slices of a bucket's state: name -> (start in the owned range, numel, values)."""
    parts: dict[str, list[tuple[int, int, Tensor]]] = {}
    for fragment, state in sharded.runs.fragment_states(bucket):
        for name, value in state.items():
            if isinstance(value, Sliced) and value.numel:
                parts.setdefault(name, []).append((fragment.start, fragment.numel, value.tensor))
    return parts


def full_state(bucket: Bucket, dtype: torch.dtype, parts: list[tuple[int, int, Tensor]]) -> Tensor:
    """Gather one state of the whole bucket: a new tensor [layout.numel] on the device. Blocking, on all ranks."""
    low, _ = bucket.owned_range
    full = torch.zeros(bucket.layout.numel, dtype=dtype, device=bucket.comm.device)
    for start, numel, value in parts:
        full[low + start : low + start + numel].copy_(value)
    if bucket.plan.shards_master:
        bucket.comm.all_gather(full, f"{bucket.label} (optimizer state)").wait()
    return full
