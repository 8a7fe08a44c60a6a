"""Gradient norms and clipping on shards.

A norm is a sum of partial sums, one for each rank. A rank's partial sum goes over its shards of all buckets, in order.
The cuts are those of the shards at every stage, also where gradients rest replicated, so all stages agree to the bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.engine.engine import Engine
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.planning.layout import cut_runs


def shard_grads(engine: Engine, params: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's part of the reduced gradients of ``params``, as views that tile its shards."""
    params = list(params)
    engine.forget_zeroed()
    engine.check_reduced(params)
    wanted = _slots_of(engine, params)
    pieces: list[Tensor] = []
    for bucket in engine.buckets:
        if bucket.grad is None or bucket not in wanted:
            continue
        shard = bucket.grad[bucket.own_shard_of_owned]
        if len(wanted[bucket]) == len(bucket.params):
            pieces.append(shard)
            continue
        fragments = bucket.layout.fragments(engine.comm.shard_rank)
        keys = [True if f.index in wanted[bucket] else None for f in fragments]
        pieces += [shard[run.start : run.stop] for _, run in cut_runs(fragments, keys)]
    return pieces


def grad_norm_of(engine: Engine, params: Sequence[nn.Parameter], norm_type: float = 2.0) -> Tensor:
    """The norm of the reduced gradients of ``params`` over all ranks: 0-d, fp32 (fp64 of fp64). All ranks call it."""
    device = engine.comm.device
    # A place for each rank, where the others add zeros, and the sum over places afterwards: the order in which a
    # backend adds up ranks would otherwise be seen in the last bits.
    partial = torch.zeros(engine.comm.shard_size, dtype=torch.float64, device=device)
    cell = partial[engine.comm.shard_rank]
    own = shard_grads(engine, params)
    for grad in own if engine.comm.replica == 0 else ():  # the other replicas hold the same
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))
        norm = norm.to(device)
        if math.isinf(norm_type):
            torch.maximum(cell, norm.double(), out=cell)
        else:
            cell.add_(norm.double() ** norm_type)
    engine.comm.sum_(partial)
    whole = partial.max() if math.isinf(norm_type) else partial.sum() ** (1.0 / norm_type)
    return whole.to(_wide_dtype(engine, params))


def _wide_dtype(engine: Engine, params: Sequence[nn.Parameter]) -> torch.dtype:
    """The dtype of a norm: at least fp32, and the same on all ranks, also on one that holds no gradient."""
    dtypes = [bucket.dtypes.grad.to_real() for bucket in _slots_of(engine, params)]
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def scale_grads(engine: Engine, params: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply the reduced gradients of ``params`` in place, wherever they rest."""
    for grad in owned_grads(engine, params):
        grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)


def owned_grads(engine: Engine, params: Iterable[nn.Parameter]) -> list[Tensor]:
    """All that this rank holds of the reduced gradients of ``params``, as views (replicated ones whole)."""
    # Steps under way own their gradients until they are over, and callers change them in place.
    engine.after_step.wait_for_steps()
    result = []
    for bucket, slots in _slots_of(engine, params).items():
        if bucket.grad is not None:
            fragments = bucket.owned_fragments()
            keys = [True if f.index in slots else None for f in fragments]
            result += [bucket.grad[run.start : run.stop] for _, run in cut_runs(fragments, keys)]
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
    # All ranks skip the step or none does. A rank that decided by its own shards would step apart from the others.
    found = any(not bool(torch.isfinite(grad).all()) for grad in shard_grads(engine, params))
    return bool(engine.comm.max_(torch.tensor([found], dtype=torch.uint8)))
