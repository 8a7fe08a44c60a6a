"""Clipping of sharded gradients, and what else is asked of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.engine.engine import Engine
from lightning_zero.engine.passes import grad_changes
from lightning_zero.engine.passes.grad_norms import alike, parts_of_shards, refuse_whole, slots_of
from lightning_zero.engine.units.bucket import Bucket


def grad_norm_of(engine: Engine, params: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
    """The norm of the reduced gradients of ``params`` over all ranks: 0-d, fp32 (fp64 of fp64). All ranks call it.

    Raises:
        ValueError: a norm of a type that does not add up over parts.
    """
    if engine.passes.look is not None:
        return torch.zeros((), device=engine.comm.device)
    return engine.grad_norms.total([engine.place_of(param) for param in params], norm_type)


def scale_grads(engine: Engine, params: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the reduced gradients of ``params`` by ``factor`` (0-d, on the device), wherever they rest.

    Whole buckets on the host are multiplied later, by their steps: the host waits for nothing here.
    """
    grad_changes.scale(_settled_slots(engine, params), factor, engine.comm.streams)


def owned_grads(engine: Engine, params: Iterable[nn.Parameter]) -> list[Tensor]:
    """All that this rank holds of the reduced gradients of ``params``, as views (replicated ones whole)."""
    return grad_changes.views_of(_settled_slots(engine, params))


def _settled_slots(engine: Engine, params: Iterable[nn.Parameter]) -> dict[Bucket, set[int]]:
    """The slots of ``params`` in their buckets, whose gradients may be changed in place."""
    places = [] if engine.passes.look is not None else [engine.place_of(param) for param in params]
    refuse_whole(places)
    engine.forget_zeroed()  # and wait for steps under way, which own their gradients until they are over
    engine.grad_norms.changed()
    return slots_of(places)


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
    if engine.passes.look is not None:
        return False
    places = [engine.place_of(param) for param in params]
    engine.forget_zeroed()
    engine.reducer.refuse_unreduced(places)
    parts = parts_of_shards(engine.buckets, slots_of(places), lambda store: store.all_finite())
    finite = [part.found for part in parts if part.found is not None]
    left = {place: part.grad for place, part in enumerate(parts) if part.grad is not None}
    checks = [torch.stack([torch.isfinite(left[p]).all() for p in same]).all() for same in alike(left).values()]
    checks += [torch.stack(finite).all()] if finite else []
    found = not all(map(bool, checks))  # on a GPU the host waits for each of these, so there are few
    # All ranks skip the step or none does. A rank that decided by its own shards would step apart from the others.
    return bool(engine.comm.max_(torch.tensor([found], dtype=torch.uint8)))
