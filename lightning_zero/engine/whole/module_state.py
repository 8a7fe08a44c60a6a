"""The state dict of a sharded module: whole values out of shards, and into them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero.engine.assembly import Assembly
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Place
from lightning_zero.engine.units.home import Home
from lightning_zero.engine.units.param import ParamInfo, values_changed
from lightning_zero.engine.whole.ranges import COPY, Hollow, Value
from lightning_zero.pretrained.stored import KeptTensor, StoredTensor


@outside_autograd
def full_parameters(engine: Assembly, *, only_rank_0: bool) -> dict[int, Tensor]:
    """Every parameter by ``id``, on the host in its checkpoint dtype; empty where it is not wanted. On all ranks."""
    _take_writes_over(engine)
    result: dict[int, Tensor] = {}
    for bucket in engine.long_work.items(engine.buckets, "gathering weights, in buckets"):
        full = bucket.full_master()  # a gather: ranks that do not want the values take part in it
        if only_rank_0 and engine.rank != 0:
            continue
        for info in bucket.params:
            result[id(info.param)] = bucket.part_of(full, info).to(device="cpu", dtype=info.dtype, copy=True)
    return result


def _take_writes_over(engine: Assembly) -> None:
    engine.settle()
    engine.writes.take_all_over()
    engine.writes.confirm_if_any()


@outside_autograd
def hollow_parameters(engine: Assembly, hollow: Hollow, *, trainable_only: bool = False) -> dict[int, Tensor]:
    """As :func:`full_parameters`, without values."""
    _take_writes_over(engine)
    return _hollow(engine, hollow, trainable_only, {})


def hollow_copy(
    engine: Assembly, hollow: Hollow, homes: Sequence[Home], *, trainable_only: bool = False
) -> dict[str, Any]:
    """``module.state_dict()`` on rank 0, nothing on others, with hollow tensors for a copy of the masters.

    Args:
        homes: of the copy of each bucket's.
    """
    name = f"copy {len(hollow.copies)}"
    hollow.copies[name] = homes
    values = _hollow(engine, hollow, trainable_only, {"optimizer": COPY, "name": name})
    return {} if engine.rank else state_dict_with(engine, values, trainable_only=trainable_only)


def _hollow(engine: Assembly, hollow: Hollow, trainable_only: bool, kind: Mapping[str, Any]) -> dict[int, Tensor]:
    places = ((number, info) for number, bucket in enumerate(engine.buckets) for info in bucket.params)
    return {
        id(info.param): hollow.tensor(Value(n, info.slot, **kind), info, info.dtype)
        for n, info in places
        if info.param.requires_grad or not trainable_only
    }


def whole_state_dict(
    engine: Assembly, *, only_rank_0: bool = True, hollow: Hollow | None = None, trainable_only: bool = False
) -> dict[str, Any]:
    """See ``Engine.state_dict``."""
    if hollow is None:
        values = full_parameters(engine, only_rank_0=only_rank_0)
    else:
        values = hollow_parameters(engine, hollow, trainable_only=trainable_only)
    if only_rank_0 and engine.rank != 0:
        return {}
    return state_dict_with(engine, values, trainable_only=trainable_only)


def state_dict_with(engine: Assembly, values: Mapping[int, Tensor], *, trainable_only: bool = False) -> dict[str, Any]:
    """``module.state_dict()`` with ``values``, by ``id`` of the parameter, in the place of parameters.

    Args:
        trainable_only: leave parameters out that are frozen.
    """
    with engine.placeholders_allowed():
        state = engine.module.state_dict(keep_vars=True)
    by_id = {id(info.param): info for b in engine.buckets for info in b.params}
    by_storage = {_identity(info.param): info for info in by_id.values()}

    def info_of(entry: Any) -> ParamInfo | None:
        if not isinstance(entry, Tensor):
            return None
        # By its memory: an override of ``state_dict`` has detached the parameter, which is another object then, with
        # the same placeholder.
        return by_id.get(id(entry)) or by_storage.get(_identity(entry))

    result = type(state)()
    for key, entry in state.items():
        info = info_of(entry)
        if info is None:
            result[key] = entry.detach().to("cpu", copy=True) if isinstance(entry, Tensor) else entry
        elif info.param.requires_grad or not trainable_only:
            result[key] = values[id(info.param)]
    if hasattr(state, "_metadata"):
        result._metadata = state._metadata  # type: ignore[attr-defined]
    return result


def _identity(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class _CopyIntoShards(TorchFunctionMode):
    """Turns ``param.copy_(value)`` of ``Module.load_state_dict`` into a write to this rank's slice."""

    def __init__(self, engine: Assembly) -> None:
        super().__init__()
        self.engine = engine
        self.failed: OSError | None = None  # what has kept a value from being read
        self.did: Callable[[nn.Parameter], object] = lambda param: None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[1], KeptTensor):
            return args[0]
        if func is Tensor.copy_ and isinstance(args[0], nn.Parameter) and self.engine.owns(args[0]):
            place = self.engine.place_of(args[0])
            try:
                write_param(place, args[1])
            except OSError as error:
                self.failed = error
                raise
            self.did(args[0])
            return args[0]
        return func(*args, **(kwargs or {}))


@outside_autograd
def write_param(place: Place, value: Tensor) -> None:
    """Set one parameter from a full value of its shape; every rank takes its own part."""
    bucket, info = place
    bucket.write_master(info, value.detach())
    if not bucket.reshards and not isinstance(value, StoredTensor):  # else by the push and the gather that follow
        assert info.gathered is not None
        info.gathered.copy_(value.detach().reshape(info.shape))
    values_changed([info])


def load_whole(engine: Assembly, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """See ``Engine.load_state_dict``."""
    own: dict[int, int] = {}

    def total() -> int:
        own.update(_own_nbytes(engine))
        return sum(own.values())

    with loading_into_shards(engine) as copies, engine.long_work.bytes("loading weights", total) as did:
        copies.did = lambda param: did(own.pop(id(param), 0))  # once, of those that are tied

        def load() -> Any:
            try:
                return engine.module.load_state_dict(state, strict=strict)
            except RuntimeError:  # torch's, of all that has failed
                if copies.failed is not None:
                    raise copies.failed from None
                raise

        # A rank that cannot read its part would leave the others waiting in what follows a load.
        return engine.comm.together("loading a checkpoint", load, patient=True)


def _own_nbytes(engine: Assembly) -> dict[int, int]:
    """By ``id`` of a parameter: the bytes of its masters that this rank has."""
    found: dict[int, int] = {}
    for bucket in engine.buckets:
        for fragment in bucket.owned_fragments():
            param = bucket.params[fragment.index].param
            found[id(param)] = found.get(id(param), 0) + fragment.numel * bucket.home.master.element_size()
    return found


def keeping_frozen(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` of a checkpoint without frozen parameters, with what makes a load leave them as they are."""
    params = module.named_parameters(remove_duplicate=False)
    lacking = {fqn: p for fqn, p in params if not p.requires_grad and fqn not in state}
    return {**state, **{fqn: KeptTensor(p.shape, p.dtype) for fqn, p in lacking.items()}}


@contextlib.contextmanager
def loading_into_shards(engine: Assembly) -> Iterator[_CopyIntoShards]:
    """Make ``module.load_state_dict`` write slices, inside. On all ranks, each with the same full values."""
    engine.settle()
    # Before the load: taken over later, what the user wrote earlier would replace what is loaded.
    engine.writes.take_all_over()
    with engine.placeholders_allowed(), _CopyIntoShards(engine) as copies:
        yield copies
    engine.masters_changed()
