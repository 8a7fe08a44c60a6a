"""Looking at and changing whole parameters, gradients and optimizer state of a sharded module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_zero.config import ConfigError
from lightning_zero.engine.assembly import Assembly
from lightning_zero.engine.steps.optimizer import ShardedOptimizer
from lightning_zero.engine.steps.runs import Sliced
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.home import opened
from lightning_zero.engine.units.param_info import values_changed
from lightning_zero.engine.units.unit import State

# -- gather -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def show_full(
    engine: Assembly, params: Iterable[nn.Parameter], *, from_rank: int | None = None, grads: bool = False
) -> Iterator[None]:
    """What :func:`lightning_zero.gather` does: inside, ``params`` (and the others of their buckets) hold full masters.

    What is written to them inside is kept. All ranks enter, and write the same values unless ``from_rank`` names the
    one whose values count. Where all parameters of the module are shown, it is plain inside: without our hooks.
    """
    wanted = {engine.place_of(p).bucket for p in params}
    if (from_rank is not None or grads) and wanted & set(engine.shown):
        raise RuntimeError(
            "gather(from_rank=) and gather(grads=True) cannot be nested in another gather() of the same parameters. "
            "Give these arguments to the outer one."
        )
    buckets = [b for b in engine.buckets if b in wanted and not b.is_plain]
    shown = _show(engine, buckets, grads)
    whole = bool(buckets) and len(engine.shown) == len(engine.buckets)
    put_back = engine.passes.hooks.lift_off() if whole else lambda: None
    try:
        yield
        _refuse_replaced(engine)
        _write_back(shown, from_rank)
    finally:
        put_back()
        _hide(engine, shown)


def _refuse_replaced(engine: Assembly) -> None:
    """Raise where the module has got other parameter objects, or these other shapes: nobody would train that."""
    now = dict(engine.module.named_parameters(remove_duplicate=False))
    for bucket in engine.buckets:
        for info in bucket.params:
            for fqn in info.fqns:
                if now.get(fqn, info.param) is not info.param:
                    raise RuntimeError(
                        f"{fqn} was replaced by another parameter inside gather(), which is not sharded and would not "
                        "be trained. Write to the parameter (param.copy_(value), load_state_dict(assign=False))."
                    )
            info.check_shape(info.param.shape)


@outside_autograd
def _show(engine: Assembly, buckets: list[Bucket], grads: bool) -> dict[Bucket, tuple[Tensor, Tensor | None]]:
    engine.settle()
    engine.writes.take_all_over()
    engine.writes.confirm_if_any()
    engine.forget_zeroed()
    if grads:
        engine.check_reduced(info.param for bucket in buckets for info in bucket.params)
    shown: dict[Bucket, tuple[Tensor, Tensor | None]] = {}
    for bucket in buckets:
        full = bucket.full_master()
        full_grad = full_reduced_grad(bucket) if grads else None
        bucket.show_plain(full)
        for info in bucket.params:
            if full_grad is not None and info.param.grad is not None:
                part = bucket.part_of(full_grad, info)
                info.param.grad = part.to(info.param.dtype) if part.dtype != info.param.dtype else part
        shown[bucket] = (full, full_grad)
    return shown


@outside_autograd
def _write_back(shown: Mapping[Bucket, tuple[Tensor, Tensor | None]], from_rank: int | None) -> None:
    for bucket, (full, full_grad) in shown.items():
        replaced = []
        for info in bucket.params:  # a parameter whose .data was replaced inside
            part = bucket.part_of(full, info)
            if info.param.data_ptr() != part.data_ptr() and info.param.shape == info.shape:
                part.copy_(info.param.data)
                replaced.append(info)
        if from_rank is not None:
            bucket.comm.broadcast(full, from_rank)
        values_changed(replaced if from_rank is None else bucket.params)
        low, high = bucket.owned_range
        with opened(bucket.home, changed=True) as master:
            master.copy_(full[low:high])
            bucket.push()
        if not bucket.reshards or bucket.full.allocated:
            bucket.full.data.copy_(full)
        if full_grad is not None and bucket.grad is not None:
            for info in bucket.params:
                if info.param.grad is not None:
                    bucket.part_of(full_grad, info).copy_(info.param.grad)
            bucket.grad.copy_(full_grad[low:high])


@outside_autograd
def _hide(engine: Assembly, shown: Mapping[Bucket, tuple[Tensor, Tensor | None]]) -> None:
    for unit in engine.units:
        for bucket in unit.buckets:
            if bucket not in shown:
                continue
            engine.writes.forget(bucket)
            bucket.hide_plain(gathered=not bucket.reshards or unit.state is State.GATHERED)
            if shown[bucket][1] is not None:
                engine.sentinels.place(info for info in bucket.params if info.param.grad is not None)


def full_reduced_grad(bucket: Bucket) -> Tensor | None:
    """On all ranks: the reduced gradient of a whole bucket [layout.numel], a new tensor; None where there is none."""
    if bucket.grad is None:
        return None
    if not bucket.plan.shards_master:
        return bucket.grad.clone()
    low, high = bucket.owned_range
    full = bucket.grad.new_zeros(bucket.layout.numel)
    full[low:high].copy_(bucket.grad)
    bucket.comm.all_gather(full, f"{bucket.label} (gradients)").wait()
    return full


# -- state dicts of the module ----------------------------------------------------------------------------------------


@outside_autograd
def full_parameters(engine: Assembly, *, only_rank_0: bool) -> dict[int, Tensor]:
    """On all ranks: every parameter by ``id``, on the host in its checkpoint dtype; empty where it is not wanted."""
    engine.settle()
    engine.writes.take_all_over()
    engine.writes.confirm_if_any()
    result: dict[int, Tensor] = {}
    for bucket in engine.buckets:
        full = bucket.full_master()
        if only_rank_0 and engine.rank != 0:
            continue
        for info in bucket.params:
            result[id(info.param)] = bucket.part_of(full, info).to(device="cpu", dtype=info.dtype, copy=True)
    return result


def module_state_dict(engine: Assembly, *, only_rank_0: bool = True) -> dict[str, Any]:
    """See ``Engine.state_dict``."""
    values = full_parameters(engine, only_rank_0=only_rank_0)
    if only_rank_0 and engine.rank != 0:
        return {}
    with engine.placeholders_allowed():
        state = engine.module.state_dict(keep_vars=True)
    by_storage = {_identity(info.param): info for b in engine.buckets for info in b.params}

    def value(entry: Any) -> Any:
        if isinstance(entry, Tensor):
            if id(entry) in values:
                return values[id(entry)]
            info = by_storage.get(_identity(entry))  # an override detached it
            if info is not None:
                return values[id(info.param)]
            return entry.detach().to("cpu", copy=True)
        return entry

    result = type(state)((key, value(entry)) for key, entry in state.items())
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], nn.Parameter) and self.engine.owns(args[0]):
            place = self.engine.place_of(args[0])
            write_param(place, args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


@outside_autograd
def write_param(place: Place, value: Tensor) -> None:
    """Set one parameter from a full value of its shape; every rank takes its own part."""
    bucket, info = place
    bucket.write_master(info, value.detach())
    if not bucket.reshards:
        assert info.gathered is not None
        info.gathered.copy_(value.detach().reshape(info.shape))
    values_changed([info])


def load_module_state_dict(engine: Assembly, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """See ``Engine.load_state_dict``."""
    with loading_into_shards(engine):
        return engine.module.load_state_dict(state, strict=strict)


@contextlib.contextmanager
def loading_into_shards(engine: Assembly) -> Iterator[None]:
    """On all ranks: inside, ``module.load_state_dict`` of full values, the same on each, writes this rank's slices."""
    engine.settle()
    engine.writes.take_all_over()  # what was written before must not come after
    with engine.placeholders_allowed(), _CopyIntoShards(engine):
        yield
    engine.masters_changed()


# -- optimizer state --------------------------------------------------------------------------------------------------


def sharded_optimizer(engine: Assembly, optimizer: Optimizer) -> ShardedOptimizer:
    for sharded in engine.optimizers:
        if sharded.optimizer is optimizer:
            return sharded
    raise ConfigError("this optimizer does not step the sharded module. Add it by engine.add_optimizer(optimizer).")


@outside_autograd
def optimizer_state(engine: Assembly, optimizer: Optimizer, *, only_rank_0: bool = True) -> dict[str, Any]:
    """See ``Engine.optimizer_state``."""
    sharded = sharded_optimizer(engine, optimizer)
    engine.settle()
    wanted = not only_rank_0 or engine.rank == 0
    states = _full_states(engine, sharded, wanted)
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    number = 0
    for group, places in zip(optimizer.param_groups, sharded.places(), strict=True):
        ids = list(range(number, number + len(places)))
        for place_id, place in zip(ids, places, strict=True):
            if found := states.get((place.bucket, place.info.slot)):
                state[place_id] = found
        number += len(places)
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": ids})
    return {"state": state, "param_groups": groups} if wanted else {}


_Key = tuple[int, int]  # bucket, slot


def _full_states(engine: Assembly, sharded: ShardedOptimizer, wanted: bool) -> dict[tuple[Bucket, int], dict[str, Any]]:
    """Every parameter's state with full tensors. Small messages say who has what; then a gather per bucket and name."""
    buckets = engine.buckets
    known: dict[_Key, dict[str, Any]] = {}
    for contribution in engine.comm.all_gather_objects(_who_has_what(buckets, sharded), "optimizer state"):
        for key, entry in contribution.items():
            known.setdefault(key, {}).update(entry)
    result: dict[tuple[Bucket, int], dict[str, Any]] = {}
    for i, bucket in enumerate(buckets):
        slots = {slot: entry for (b, slot), entry in known.items() if b == i}
        dtypes = {n: v for entry in slots.values() for n, v in entry.items() if isinstance(v, torch.dtype)}
        with opened(bucket.home):
            parts = _local_parts(bucket, sharded)
            full = {name: _full_entry(bucket, dtypes[name], parts.get(name, [])) for name in sorted(dtypes)}
        if not wanted:
            continue
        for slot, entry in slots.items():
            result[bucket, slot] = {
                name: bucket.part_of(full[name], bucket.params[slot]).to("cpu", copy=True)
                if isinstance(value, torch.dtype)
                else copy.deepcopy(value)  # a plain optimizer would add to a step count as often as it is shared
                for name, value in entry.items()
            }
    return result


def _who_has_what(buckets: list[Bucket], sharded: ShardedOptimizer) -> dict[_Key, dict[str, Any]]:
    """This rank's state by parameter: a dtype stands for a sliced value, plain values for themselves."""
    local: dict[_Key, dict[str, Any]] = {}
    for i, bucket in enumerate(buckets):
        for fragment, state in sharded.runs.fragment_states(bucket):
            entry = local.setdefault((i, fragment.index), {})
            for name, value in state.items():
                if isinstance(value, Sliced):
                    entry[name] = value.whole.dtype
                else:
                    entry[name] = value.cpu() if isinstance(value, Tensor) else value
    return local


def _local_parts(bucket: Bucket, sharded: ShardedOptimizer) -> dict[str, list[tuple[int, int, Tensor]]]:
    """This rank's slices of a bucket's state: name -> (start in the owned range, numel, values)."""
    parts: dict[str, list[tuple[int, int, Tensor]]] = {}
    for fragment, state in sharded.runs.fragment_states(bucket):
        for name, value in state.items():
            if isinstance(value, Sliced):
                parts.setdefault(name, []).append((fragment.start, fragment.numel, value.tensor))
    return parts


def _full_entry(bucket: Bucket, dtype: torch.dtype, parts: list[tuple[int, int, Tensor]]) -> Tensor:
    low, _ = bucket.owned_range
    full = torch.zeros(bucket.layout.numel, dtype=dtype, device=bucket.comm.device)
    for start, numel, value in parts:
        full[low + start : low + start + numel].copy_(value)
    if bucket.plan.shards_master:
        bucket.comm.all_gather(full, f"{bucket.label} (optimizer state)").wait()
    return full


def load_optimizer_state(engine: Assembly, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """See ``Engine.load_optimizer_state``."""
    sharded = sharded_optimizer(engine, optimizer)
    engine.settle()
    saved, own = state["param_groups"], optimizer.param_groups
    sizes = [len(g["params"]) for g in saved], [len(g["params"]) for g in own]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the checkpoint's optimizer has param groups of {sizes[0]} parameters, this optimizer of {sizes[1]}. "
            "Build the optimizer as it was when the checkpoint was saved."
        )
    states: dict[tuple[Bucket, int], dict[str, Any]] = {}
    for group, saved_group, places in zip(own, saved, sharded.places(), strict=True):
        group.update({k: v for k, v in saved_group.items() if k != "params"})
        for number, place in zip(saved_group["params"], places, strict=True):
            if found := state["state"].get(number):
                _check_shapes(place, found)
                states[place.bucket, place.info.slot] = found
    with torch.inference_mode(False), torch.no_grad():
        sharded.load_param_states(states)


def _check_shapes(place: Place, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != place.info.shape and value.numel() != 1:
            raise ConfigError(
                f"the checkpoint's optimizer state {name!r} of {place.info.fqn} has shape {tuple(value.shape)}, "
                f"expected {tuple(place.info.shape)}. Load a checkpoint of the same model."
            )
