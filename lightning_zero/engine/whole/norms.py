"""Gradient norms and clipping on shards.

A norm is a sum of partial sums, one for each rank. A rank's partial sum goes over its shards of all buckets, in order.
The cuts are those of the shards at every stage, also where gradients rest replicated, so all stages agree to the bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.engine.engine import Engine
from lightning_zero.engine.passes.grad_norms import alike, norms_of
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.grad_store import Factor, GradStore
from lightning_zero.planning.layout import cut_runs


class _Shard(NamedTuple):
    """A part of this rank's shards, or what was found out about it when it was on its way."""

    grad: Tensor | None
    found: Tensor | None = None


def _shards(
    engine: Engine, params: Iterable[nn.Parameter], found: Callable[[GradStore], Tensor | None]
) -> list[_Shard]:
    """This rank's part of the reduced gradients of ``params``, in views that tile its shards, in order.

    Args:
        found: gives what is known of a bucket's shard already; what is known of is not waited for.
    """
    params = list(params)
    engine.forget_zeroed()
    engine.check_reduced(params)
    wanted = _slots_of(engine, params)
    pieces: list[_Shard] = []
    for bucket in engine.buckets:
        store = bucket.grad_store
        if not store.is_there or bucket not in wanted:
            continue
        is_whole = len(wanted[bucket]) == len(bucket.params)
        if is_whole and (known := found(store)) is not None:
            pieces.append(_Shard(None, known))
            continue
        assert store.value is not None
        shard = store.value[bucket.own_shard_of_owned]
        if is_whole:
            pieces.append(_Shard(shard))
            continue
        fragments = bucket.layout.fragments(engine.comm.shard_rank)
        keys = [True if f.index in wanted[bucket] else None for f in fragments]
        pieces += [_Shard(shard[run.start : run.stop]) for _, run in cut_runs(fragments, keys)]
    return pieces


def grad_norm_of(engine: Engine, params: Sequence[nn.Parameter], norm_type: float = 2.0) -> Tensor:
    """The norm of the reduced gradients of ``params`` over all ranks: 0-d, fp32 (fp64 of fp64). All ranks call it."""
    device = engine.comm.device
    # A place for each rank, where the others add zeros, and the sum over places afterwards: the order in which a
    # backend adds up ranks would otherwise be seen in the last bits.
    partial = torch.zeros(engine.comm.shard_size, dtype=torch.float64, device=device)
    cell = partial[engine.comm.shard_rank]
    own = _shards(engine, params, lambda store: store.norm(norm_type))
    if own and engine.comm.replica == 0:  # the other replicas hold the same
        norms = _norms_of(own, norm_type, device)  # of all buckets at once: a GPU is asked a few times, not for each
        cell.copy_(norms.max() if math.isinf(norm_type) else (norms**norm_type).sum())
    engine.comm.sum_(partial)
    whole = partial.max() if math.isinf(norm_type) else partial.sum() ** (1.0 / norm_type)
    return whole.to(_wide_dtype(engine, params))


def _norms_of(shards: Sequence[_Shard], norm_type: float, device: torch.device) -> Tensor:
    """The norm of each, in order, wherever they rest: [len(shards)] fp64 on ``device``."""
    norms = {place: shard.found.double() for place, shard in enumerate(shards) if shard.found is not None}
    left = {place: shard.grad for place, shard in enumerate(shards) if shard.grad is not None}
    norms |= norms_of(left, norm_type, device)
    return torch.stack([norms[place] for place in range(len(shards))])


def _wide_dtype(engine: Engine, params: Sequence[nn.Parameter]) -> torch.dtype:
    """The dtype of a norm: at least fp32, and the same on all ranks, also on one that holds no gradient."""
    dtypes = [bucket.dtypes.grad.to_real() for bucket in _slots_of(engine, params)]
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def scale_grads(engine: Engine, params: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the reduced gradients of ``params`` by ``factor`` (0-d, on the device), wherever they rest.

    Whole buckets on the host are multiplied later, by their steps: the host waits for nothing here.
    """
    streams = engine.comm.streams
    slots_of = _slots_of(engine, params)
    _wait_for_steps(engine)
    on_host = functools.cache(lambda: Factor(*streams.to_host(factor)))  # one copy for all

    def scales_itself(bucket: Bucket) -> bool:
        return len(slots_of[bucket]) == len(bucket.params) and bucket.grad_store.scale_later(on_host)

    grads = dict(enumerate(_views({b: slots for b, slots in slots_of.items() if not scales_itself(b)})))
    for places in alike(grads).values():
        same = [grads[place] for place in places]
        torch._foreach_mul_(same, factor.to(same[0].device))


def owned_grads(engine: Engine, params: Iterable[nn.Parameter]) -> list[Tensor]:
    """All that this rank holds of the reduced gradients of ``params``, as views (replicated ones whole)."""
    _wait_for_steps(engine)
    return _views(_slots_of(engine, params))


def _wait_for_steps(engine: Engine) -> None:
    # Steps under way own their gradients until they are over, and callers change them in place.
    engine.after_step.wait_for_steps()
    engine.grad_norms.changed()


def _views(slots_of: Mapping[Bucket, set[int]]) -> list[Tensor]:
    result = []
    for bucket, slots in slots_of.items():
        if (grad := bucket.grad) is not None:
            fragments = bucket.owned_fragments()
            keys = [True if f.index in slots else None for f in fragments]
            result += [grad[run.start : run.stop] for _, run in cut_runs(fragments, keys)]
    return result


def _slots_of(engine: Engine, params: Iterable[nn.Parameter]) -> dict[Bucket, set[int]]:
    """The slots of ``params`` in their buckets."""
    slots: dict[Bucket, set[int]] = {}
    for bucket, info in map(engine.place_of, params):
        slots.setdefault(bucket, set()).add(info.slot)
    return slots


def clip_by_norm(
    engine: Engine,
    params: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of ``params`` so that their norm is at most ``max_norm``; returns the norm before.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    norm = grad_norm_of(engine, params, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"the gradient norm is {norm.item()}: gradients cannot be clipped.")
    # As torch.nn.utils.clip_grad_norm_: no host synchronization, a factor of one where nothing is to be clipped.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale_grads(engine, params, factor)
    return norm


def clip_by_value(engine: Engine, params: Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamp the gradients of ``params`` to ``[-clip_value, clip_value]``."""
    for grad in owned_grads(engine, params):
        grad.clamp_(-clip_value, clip_value)


def overflowed(engine: Engine, params: Iterable[nn.Parameter]) -> bool:
    """Whether any rank holds a gradient of ``params`` that is not finite; checked where they rest. On all ranks."""
    shards = _shards(engine, params, lambda store: store.all_finite())
    finite = [shard.found for shard in shards if shard.found is not None]
    left = {place: shard.grad for place, shard in enumerate(shards) if shard.grad is not None}
    checks = [torch.stack([torch.isfinite(left[p]).all() for p in places]).all() for places in alike(left).values()]
    checks += [torch.stack(finite).all()] if finite else []
    found = not all(map(bool, checks))  # on a GPU the host waits for each of these, so there are few
    # All ranks skip the step or none does. A rank that decided by its own shards would step apart from the others.
    return bool(engine.comm.max_(torch.tensor([found], dtype=torch.uint8)))
