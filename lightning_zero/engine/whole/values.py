"""Find which rank saves which elements of the masters and of optimizer state, and make the tensors without values that
stand for them in a state dict until they are saved.

At any stage exactly one rank saves each element: a rank saves only its shard, even if masters are replicated, and only
the first of several replicas saves. ``FakeTensors`` are for a checkpoint in one file, into which each rank writes its
ranges. ``TensorParts`` are for a checkpoint folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_zero.engine.build import Core
from lightning_zero.engine.steps.optimizer import Stepper
from lightning_zero.engine.units.bucket import Bucket, joined
from lightning_zero.engine.units.master_storage import FlatSlice, MasterStorage, opened
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.mesh.split import Split
from lightning_zero.optimizers.state_trees import Leaf, State, leaves_in, with_leaves
from lightning_zero.planning.boxes import memory_order

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

MASTER = ""  # the name of a parameter's master values
COPY = -1  # in place of the optimizer's number: a copy of the masters

Copies = Mapping[str, Sequence[MasterStorage]]  # storages of copies of all buckets' masters, by name of the copy
Entries = Mapping[int, dict[int, State]]  # state by bucket and slot, with a Leaf for each tensor


class Value(NamedTuple):
    """Identifies a parameter's masters, a state tensor of an optimizer for the parameter, or a copy of the masters."""

    bucket: int
    slot: int
    optimizer: int = 0
    name: str = MASTER


class Part(NamedTuple):
    """Adjacent elements of ``value``, from element ``start`` on. Read ``source`` only while ``storage`` is open."""

    value: Value
    start: int
    source: FlatSlice
    storage: MasterStorage | None


class Range(NamedTuple):
    value: Value
    start: int
    values: Tensor  # [n] on any device; valid until the next range is requested


# -- parts of this rank -----------------------------------------------------------------------------------------------


def own_parts(engine: Core, copies: Copies | None = None) -> Iterator[Part]:
    """Yield the parts of :func:`own_fragments`, with ``start`` relative to the whole tensor. If tensor or expert
    parallelism splits a tensor, its parts are cut again for this."""
    for part in own_fragments(engine, copies):
        yield from in_whole(part, engine.buckets[part.value.bucket].params[part.value.slot].split)


def in_whole(part: Part, split: Split | None) -> Iterator[Part]:
    """Cut ``part`` into parts whose elements are adjacent in the whole tensor, which ``split`` divides among ranks."""
    if split is None:
        yield part
        return
    for start, whole_start, numel in split.pieces(part.start, part.start + part.source.numel):
        yield part._replace(start=whole_start, source=part.source.part(start - part.start, numel))


def own_fragments(engine: Core, copies: Copies | None = None) -> Iterator[Part]:
    """Yield the parts of masters, state and ``copies`` that this rank saves, storage by storage. Opens no storage."""
    for number, bucket in enumerate(engine.buckets):
        if bucket.comm.replicate.index:  # the first replica saves
            continue
        yield from _of_masters(bucket, Value(number, 0), bucket.storage)
        for index, sharded in enumerate(engine.optimizers):
            for slot, name, start, source in sharded.parts(bucket):
                yield Part(Value(number, slot, index, name), start, source, bucket.storage)
        for name, storages in (copies or {}).items():
            yield from _of_masters(bucket, Value(number, 0, COPY, name), storages[number])


def _of_masters(bucket: Bucket, value: Value, storage: MasterStorage) -> Iterator[Part]:
    for fragment in bucket.owned_fragments():
        if (part := fragment.within(bucket.own_shard_of_owned)) is not None:
            start, low, high = part
            source = FlatSlice(storage.master, fragment.start + low, high - low)
            yield Part(value._replace(slot=fragment.index), start, source, storage)


def own_entries(engine: Core, sharded: Stepper, *, once: bool = False) -> Entries:
    """Return the optimizer state that this rank saves, by bucket and slot. ``once``: see :meth:`Stepper.entries`."""
    buckets = {number: bucket for number, bucket in enumerate(engine.buckets) if not bucket.comm.replicate.index}
    found = {number: sharded.entries(bucket, once=once) for number, bucket in buckets.items()}
    return {number: entries for number, entries in found.items() if entries}


def all_entries(engine: Core, sharded: Stepper) -> Entries:
    """Return the optimizer state that all ranks save, by bucket and slot. Collective."""
    known: dict[int, dict[int, State]] = {}
    for told in engine.comm.all_gather_objects(own_entries(engine, sharded), "optimizer state"):
        for number, slots in told.items():
            for slot, entry in slots.items():
                known.setdefault(number, {}).setdefault(slot, {}).update(entry)
    return known


# -- values -----------------------------------------------------------------------------------------------------------


def own_ranges(engine: Core, wanted: Container[Value], copies: Copies) -> Iterator[Range]:
    """Yield the parts of the ``wanted`` values that this rank saves, with one storage open at a time. Call
    ``Engine.state_dict`` first: it waits for steps, and copies users' writes into the masters."""
    for storage, parts in itertools.groupby(own_parts(engine, copies), lambda part: part.storage):
        if own := [part for part in parts if part.value in wanted]:
            assert storage is not None
            with opened(storage):
                for part in own:
                    yield Range(part.value, part.start, part.source.tensor)


def gathered_ranges(engine: Core, wanted: Mapping[Value, torch.dtype], copies: Copies) -> Iterator[Range]:
    """Gather the values in ``wanted`` (equal on all ranks), and yield each value as one range. Collective."""
    known = [all_entries(engine, sharded) for sharded in engine.optimizers]
    for number, bucket in enumerate(engine.buckets):
        of_params = {v[2:] for v in wanted if v.bucket == number and (v.name == MASTER or v.optimizer == COPY)}
        for index, name in sorted(of_params):
            if index == COPY:
                copy = copies[name][number].master
                full = bucket.gathered([(0, copy)], copy.dtype, "copy")
            else:
                full = bucket.full_master()
            for info in bucket.params:
                if (value := Value(number, info.slot, index, name)) in wanted:
                    yield Range(value, 0, _flat(joined(engine.comm, info, bucket.part_of(full, info))))
        for index, sharded in enumerate(engine.optimizers):
            leaves = {
                slot: [leaf for leaf in leaves_in(entry) if Value(number, slot, index, leaf.name) in wanted]
                for slot, entry in known[index].get(number, {}).items()
            }
            for slot, leaf, values in sharded.gathered(bucket, leaves):
                yield Range(
                    Value(number, slot, index, leaf.name), 0, _flat(joined(engine.comm, bucket.params[slot], values))
                )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def full_entries(
    bucket: Bucket, sharded: Stepper, entries: Mapping[int, State], keep: Callable[[ParamInfo, Tensor], Tensor | None]
) -> dict[int, State]:
    """Gather the tensors of a bucket's optimizer state. Return ``entries`` with ``keep(parameter, gathered tensor)`` in
    place of each leaf. Collective."""
    leaves = {slot: leaves_in(entry) for slot, entry in entries.items()}
    values = {(s, leaf): keep(bucket.params[s], value) for s, leaf, value in sharded.gathered(bucket, leaves)}
    return {slot: with_leaves(entry, lambda leaf, slot=slot: values[slot, leaf]) for slot, entry in entries.items()}  # type: ignore[misc]


# -- tensors that stand for values ------------------------------------------------------------------------------------


def _whole(like: ParamInfo | Leaf) -> tuple[Sequence[int], Sequence[int]]:
    return (like.shape, like.strides) if isinstance(like, Leaf) else (like.saved_shape, like.saved_strides)


class FakeTensors:
    """Makes tensors with a shape and dtype but no values: reading values raises. ``last``: an earlier
    :class:`FakeTensors`, whose tensors are reused (making one takes 0.1 ms). ``made``: pairs (value, its tensor)."""

    def __init__(self, last: FakeTensors | None = None) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode: FakeTensorMode = last._mode if last is not None else FakeTensorMode()
        self._kept = {(value, made.dtype): made for value, made in last.made} if last is not None else {}
        self.made: list[tuple[Value, Tensor]] = []
        self.copies: dict[str, Sequence[MasterStorage]] = {}

    def __reduce__(self) -> tuple[type[FakeTensors], tuple[()]]:
        return type(self), ()

    def tensor(self, value: Value, like: ParamInfo | Leaf, dtype: torch.dtype) -> Tensor:
        """Make or reuse a tensor for ``value``, with the whole shape and the strides that ``like`` describes."""
        shape, strides = _whole(like)
        made = self._kept.pop((value, dtype), None)
        if made is None or (made.shape, made.stride()) != (shape, strides):
            with self._mode:
                made = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        self.made.append((value, made))
        return made


class TensorParts(Tensor):
    """A tensor without values that stands for a whole tensor, of which this rank saves ``parts``. ``of``: the value
    that it stands for. ``order``: its dimensions, largest stride first. ``of_whole``: how tensor or expert parallelism
    splits it over ranks, if it does; positions in ``parts`` are then relative to this rank's part."""

    parts: tuple[Part, ...]
    order: Sequence[int]
    of_whole: Split | None
    of: Value | None
    _why = "no rank holds all of a tensor of a sharded checkpoint"
    _instead = "Choose zero/checkpoint=full, or read parameters"

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        parts: Sequence[Part],
        strides: Sequence[int],
        split: Split | None = None,
        of: Value | None = None,
    ) -> TensorParts:
        made: TensorParts = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device="cpu")  # type: ignore
        made.parts, made.order, made.of_whole, made.of = tuple(parts), memory_order(strides), split, of
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        if func is torch.ops.aten.detach.default:
            return args[0]
        cls._refuse(str(func))

    @classmethod
    def _refuse(cls, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what}: {cls._why}, so hooks that save it can look at names, shapes and dtypes only, leave tensors out "
            f"or add others. {cls._instead} inside lightning_zero.gather."
        )

    def __deepcopy__(self, memo: object) -> TensorParts:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse("pickling")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {len(self.parts)} here)"


class OnRank0(TensorParts):
    """A tensor without values, which ranks other than 0 have in place of a checkpoint's tensor that only rank 0 has."""

    _why = "rank 0 alone holds the tensors of a checkpoint that is one file"
    _instead = "Use values on rank 0 alone (if trainer.is_global_zero), or read parameters on all ranks"

    @classmethod
    def like(cls, tensor: ParamInfo | Leaf, dtype: torch.dtype) -> TensorParts:
        shape, strides = _whole(tensor)
        return cls(shape, dtype, (), strides)


class Unsharded(NamedTuple):
    """Wraps a value of optimizer state that is not sharded (a step count). Only the rank that has it saves it."""

    value: object


def parts_for_folder(entry: object, tensor_of: Callable[[Leaf], TensorParts]) -> object:
    """Return a copy of the state ``entry`` that has ``tensor_of(leaf)`` in place of each leaf, and other values wrapped
    in :class:`Unsharded`."""
    if isinstance(entry, Leaf):
        return tensor_of(entry)
    if isinstance(entry, Mapping):
        return {key: parts_for_folder(item, tensor_of) for key, item in entry.items()}
    if isinstance(entry, (list, tuple)) and leaves_in(entry):
        return [parts_for_folder(item, tensor_of) for item in entry]
    return Unsharded(entry)
