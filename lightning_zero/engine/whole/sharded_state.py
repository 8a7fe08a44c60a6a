"""State dicts whose tensors stay where they rest: each rank's hold the parts that it is to save.

No rank gathers anything. The parts of all ranks together are every element once, whatever the stage: where masters are
replicated each rank still saves a shard only, and of several replicas the first one saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.assembly import Assembly
from lightning_zero.engine.steps.owned import Owned
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.home import Home
from lightning_zero.engine.units.kept import Sliced
from lightning_zero.engine.units.param import strides_of
from lightning_zero.engine.whole.module_state import state_dict_with
from lightning_zero.engine.whole.optimizer_state import sharded_optimizer
from lightning_zero.engine.whole.owned_state import own_entries, tensors_to
from lightning_zero.planning.boxes import memory_order
from lightning_zero.planning.layout import Fragment


class Part(NamedTuple):
    """Adjacent elements of a flattened tensor."""

    start: int
    numel: int
    values: Callable[[], Tensor]  # [numel], on any device; called while ``home`` is open
    home: Home | None
    source: Sliced | None = None  # what of ``home`` they are


class TensorParts(Tensor):
    """A tensor of which this rank holds some parts.

    Attributes:
        parts: those that this rank is to save; none on a rank that holds none, or holds what another one saves.
        order: the dimensions as they are flattened, the slowest first.
    """

    parts: tuple[Part, ...]
    order: Sequence[int]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Part], order: Sequence[int]
    ) -> TensorParts:
        made: TensorParts = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device="cpu")  # type: ignore
        made.parts, made.order = tuple(parts), tuple(order)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        cls._refuse(str(func))

    @staticmethod
    def _refuse(what: str) -> None:
        raise RuntimeError(
            f"{what}: no rank holds all of a tensor of a sharded checkpoint, so hooks that save it can look at names, "
            "shapes and dtypes only, leave tensors out or add others. Choose zero/checkpoint=full, or read parameters "
            "inside lightning_zero.gather."
        )

    def __deepcopy__(self, memo: Any) -> TensorParts:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("pickling")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TensorParts({tuple(self.shape)}, {self.dtype}, {len(self.parts)} here)"


class Lone(NamedTuple):
    """A value that this rank saves, and no other one."""

    value: Any


def own_fragments(bucket: Bucket) -> list[tuple[Fragment, int]]:
    """The fragments that this rank saves, each with its start in the owned range."""
    if bucket.comm.replica:
        return []
    base = bucket.own_shard_of_owned.start
    return [(f, base + f.start) for f in bucket.layout.fragments(bucket.comm.shard_rank)]


@outside_autograd
def sharded_state_dict(
    engine: Assembly, values: Mapping[Bucket, Home] | None = None, *, trainable_only: bool = False
) -> dict[str, Any]:
    """On all ranks: ``module.state_dict()``, with :class:`TensorParts` for parameters, in the dtypes of the masters.

    Args:
        values: of each bucket the home of a copy of the masters, which is saved in their place.
        trainable_only: leave parameters out that are frozen.
    """
    engine.settle()
    engine.writes.take_all_over()
    engine.writes.confirm_if_any()
    found: dict[int, Tensor] = {}
    for bucket in engine.buckets:
        home = bucket.home if values is None else values[bucket]
        parts: dict[int, list[Part]] = {}
        for fragment, start in own_fragments(bucket):
            part = _part(fragment.offset, Sliced(home.master, start, fragment.numel), home)
            parts.setdefault(fragment.index, []).append(part)
        for info in bucket.params:
            found[id(info.param)] = TensorParts(info.shape, home.master.dtype, parts.get(info.slot, ()), info.order)
    return state_dict_with(engine, found, trainable_only=trainable_only)


def _part(offset: int, source: Sliced, home: Home) -> Part:
    return Part(offset, source.numel, lambda: source.tensor, home, source)


@outside_autograd
def sharded_optimizer_state(engine: Assembly, optimizer: Optimizer) -> dict[str, Any]:
    """On all ranks: the state of ``optimizer`` by names of parameters, with the parts that this rank holds.

    Values that belong to a whole parameter, such as a step count, are :class:`Lone` ones of the rank that holds its
    first element.
    """
    sharded = sharded_optimizer(engine, optimizer)
    engine.settle()
    places = sharded.places()
    state: dict[str, dict[str, Any]] = {}
    for bucket in engine.buckets:
        slots = {place.info.slot for group in places for place in group if place.bucket is bucket}
        found = _bucket_state(sharded.runs.fragment_states(bucket), bucket)
        if sharded.owned is not None:
            found |= _whole_state(sharded.owned, bucket)
        for slot, entry in found.items():
            if slot in slots:
                state[bucket.params[slot].fqn] = entry
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [place.info.fqn for place in own]}
        for group, own in zip(optimizer.param_groups, places, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _whole_state(owned: Owned, bucket: Bucket) -> dict[int, dict[str, Any]]:
    """By slot: what this rank saves of a bucket's tensors that are stepped whole."""
    if bucket.comm.replica:
        return {}
    parts: dict[int, dict[str, TensorParts]] = {}
    for tensor, name, leaf, source in owned.parts(bucket):
        strides = strides_of(leaf)
        own = TensorParts(leaf.shape, leaf.dtype, [_part(0, source, bucket.home)], memory_order(strides))
        parts.setdefault(tensor.info.slot, {})[name] = own
    return {
        slot: tensors_to(state, lambda name, _, slot=slot: parts[slot][name], Lone)  # type: ignore[misc]
        for slot, state in own_entries(bucket, owned).items()
    }


def _bucket_state(states: Any, bucket: Bucket) -> dict[int, dict[str, Any]]:
    """By slot: what this rank saves of a bucket's optimizer state."""
    if bucket.comm.replica:
        return {}
    own = bucket.own_shard_of_owned
    found: dict[int, dict[str, Any]] = {}
    for fragment, state in states:
        info = bucket.params[fragment.index]
        low, high = max(fragment.start, own.start), min(fragment.start + fragment.numel, own.stop)
        if low >= high and (info.numel or bucket.comm.shard_rank):
            continue
        offset = fragment.offset + low - fragment.start if info.numel else 0
        entry = found.setdefault(fragment.index, {})
        for name, value in state.items():
            if not isinstance(value, Sliced):
                if not offset:
                    entry[name] = Lone(value)
                continue
            mine = value.part(low - fragment.start, high - low)
            parts = [] if low >= high else [_part(offset, mine, bucket.home)]
            before = entry[name].parts if name in entry else ()
            entry[name] = TensorParts(info.shape, value.dtype, (*before, *parts), info.order)
    return found
