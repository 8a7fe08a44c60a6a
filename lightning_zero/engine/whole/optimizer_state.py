"""The state of an optimizer of shards, in the form that the plain optimizer would give it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.config import ConfigError
from lightning_zero.engine.assembly import Assembly
from lightning_zero.engine.steps.optimizer import ShardedOptimizer
from lightning_zero.engine.steps.owned import Owned
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.home import opened
from lightning_zero.engine.whole.owned_state import all_who_have_what, full_entries, with_values
from lightning_zero.engine.whole.ranges import Hollow, Value, full_state, local_parts
from lightning_zero.ranks.progress import SILENT


def sharded_optimizer(engine: Assembly, optimizer: Optimizer) -> ShardedOptimizer:
    for sharded in engine.optimizers:
        if sharded.optimizer is optimizer:
            return sharded
    raise ConfigError("this optimizer does not step the sharded module. Add it by engine.add_optimizer(optimizer).")


@outside_autograd
def whole_state(
    engine: Assembly, optimizer: Optimizer, *, only_rank_0: bool = True, hollow: Hollow | None = None
) -> dict[str, Any]:
    """See ``Engine.optimizer_state``."""
    sharded = sharded_optimizer(engine, optimizer)
    engine.settle()
    wanted = not only_rank_0 or engine.rank == 0
    states = _full_states(engine, sharded, wanted, hollow)
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


Entry = dict[str, Any]  # state of a parameter by name: a dtype stands for a sliced value, plain values for themselves


def _full_states(
    engine: Assembly, sharded: ShardedOptimizer, wanted: bool, hollow: Hollow | None
) -> dict[tuple[Bucket, int], dict[str, Any]]:
    """Every parameter's state with full tensors. Small messages say who has what; then a gather per bucket and name,
    unless hollow tensors are asked for."""
    # A rank may own nothing of a parameter, or of a whole bucket, and so not know that there is state. It takes part in
    # the gathers all the same: they follow from what all ranks have told, by name and in one order (``sorted``).
    known = all_who_have_what(engine, sharded)
    result: dict[tuple[Bucket, int], dict[str, Any]] = {}
    index = engine.optimizers.index(sharded)
    long_work = engine.long_work if hollow is None else SILENT
    for i, bucket in enumerate(long_work.items(engine.buckets, "gathering optimizer state, in buckets")):
        slots = known.get(i, {})
        if hollow is not None:
            whole = _hollow_part(hollow, bucket, i, index)
        else:
            full = full_states_of(bucket, sharded, slots)
            whole = _part_of(full, bucket)
        if sharded.owned is not None:
            result |= {
                (bucket, s): e for s, e in _whole_entries(bucket, i, sharded.owned, index, slots, wanted, hollow)
            }
            continue
        if not wanted:
            continue
        for slot, entry in slots.items():
            result[bucket, slot] = {
                name: whole(slot, name, value)
                if isinstance(value, torch.dtype)
                else copy.deepcopy(value)  # a plain optimizer would add to a step count as often as it is shared
                for name, value in entry.items()
            }
    return result


def _whole_entries(
    bucket: Bucket,
    number: int,
    owned: Owned,
    index: int,
    slots: Mapping[int, Entry],
    wanted: bool,
    hollow: Hollow | None,
) -> Iterator[tuple[int, Entry]]:
    if hollow is None:
        found = full_entries(bucket, owned, slots, lambda values: values.cpu() if wanted else values[:0])
    elif wanted:
        found = {
            slot: with_values(
                entry,
                lambda leaf, slot=slot: hollow.tensor(Value(number, slot, index, leaf.name), leaf, leaf.dtype),  # type: ignore[misc]
            )
            for slot, entry in slots.items()
        }
    if wanted:
        yield from found.items()


def full_states_of(bucket: Bucket, sharded: ShardedOptimizer, slots: Mapping[int, Entry]) -> dict[str, Tensor]:
    """Gather each state of a whole bucket [layout.numel], by name: on all ranks, for the same ``slots``.

    Args:
        slots: of :func:`all_who_have_what`.
    """
    dtypes = {n: v for entry in slots.values() for n, v in entry.items() if isinstance(v, torch.dtype)}
    with opened(bucket.home):
        parts = local_parts(bucket, sharded)
        return {name: full_state(bucket, dtypes[name], parts.get(name, [])) for name in sorted(dtypes)}


def _hollow_part(hollow: Hollow, bucket: Bucket, number: int, index: int) -> Callable[[int, str, torch.dtype], Tensor]:
    return lambda slot, name, dtype: hollow.tensor(Value(number, slot, index, name), bucket.params[slot], dtype)


def _part_of(full: Mapping[str, Tensor], bucket: Bucket) -> Callable[[int, str, torch.dtype], Tensor]:
    return lambda slot, name, _: bucket.part_of(full[name], bucket.params[slot]).to("cpu", copy=True)


def load_whole(engine: Assembly, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """See ``Engine.load_optimizer_state``."""
    sharded = sharded_optimizer(engine, optimizer)
    engine.settle()
    check_whole(engine, optimizer, state, "the checkpoint")
    states: dict[tuple[Bucket, int], Any] = {}
    for group, saved, place, found in _pairs(optimizer, sharded, state):
        group.update({k: v for k, v in saved.items() if k != "params"})
        if place is not None and found:
            states[place.bucket, place.info.slot] = found
    with torch.inference_mode(False), torch.no_grad():
        sharded.load_param_states(states, engine.long_work)


def check_whole(engine: Assembly, optimizer: Optimizer, state: Mapping[str, Any], what: str) -> None:
    """See ``Engine.check_optimizer_state``."""
    sharded = sharded_optimizer(engine, optimizer)
    saved, own = state["param_groups"], optimizer.param_groups
    kind = type(optimizer).__name__
    sizes = [len(g["params"]) for g in saved], [len(g["params"]) for g in own]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{what}: its optimizer has param groups of {sizes[0]} parameters, this {kind} of {sizes[1]}. Build the "
            "optimizer as it was when the checkpoint was saved."
        )
    settings = optimizer.defaults.keys() - LATER
    for theirs, ours in zip(saved, own, strict=True):
        # More of them on one side alone are those of another version or a scheduler, or names that users give groups.
        lacks, has = sorted(settings - theirs.keys()), sorted(theirs.keys() - ours.keys() - LATER)
        if lacks and has:
            raise ConfigError(
                f"{what}: its optimizer is no {kind}: it has the settings {', '.join(has)} and not {', '.join(lacks)}. "
                "Build the optimizer as it was when the checkpoint was saved."
            )
    for _, _, place, found in _pairs(optimizer, sharded, state, what):
        if place is not None and found and sharded.owned is None:  # which knows what shapes its state has
            _check_shapes(place, found, what)


# Settings that torch has given to optimizers in later versions, or that schedulers add.
LATER = frozenset(
    ("foreach", "fused", "maximize", "capturable", "differentiable", "decoupled_weight_decay", "initial_lr", "params")
)


def _pairs(
    optimizer: Optimizer, sharded: ShardedOptimizer, state: Mapping[str, Any], what: str = "the checkpoint"
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any], Place | None, Mapping[str, Any] | None]]:
    """Param group, its saved one, and each of its parameters with its saved state; each group at least once."""
    for group, saved, places in zip(optimizer.param_groups, state["param_groups"], sharded.places(), strict=True):
        yield group, saved, None, None
        for number, place in _matched(saved["params"], places, what):
            yield group, saved, place, state["state"].get(number)


def _matched(saved: Sequence[Any], places: Sequence[Place], what: str) -> list[tuple[Any, Place]]:
    """Keys of saved states with the parameters that they belong to: by name where they are names, else by order."""
    if not all(isinstance(key, str) for key in saved):
        return list(zip(saved, places, strict=True))
    names = set(saved)
    missing = [place.info.fqn for place in places if not any(fqn in names for fqn in place.info.fqns)]
    if missing:
        raise ConfigError(
            f"{what}: its optimizer has no {missing[0]} in the param group where this optimizer has it (nor "
            f"{len(missing) - 1} others). Build the optimizer as it was when the checkpoint was saved."
        )
    return [(next(fqn for fqn in place.info.fqns if fqn in names), place) for place in places]


def _check_shapes(place: Place, state: Mapping[str, Any], what: str) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != place.info.shape and value.numel() != 1:
            raise ConfigError(
                f"{what}: its optimizer state {name!r} of {place.info.fqn} has shape {tuple(value.shape)}, "
                f"expected {tuple(place.info.shape)}. Load a checkpoint of the same model."
            )
