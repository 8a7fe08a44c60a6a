"""Clipping of sharded gradients, and what else is asked of all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.engine.engine import Engine
from lightning_zero.engine.passes.grad_norms import alike, parts_of_shards, refuse_whole, slots_of, views_of
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.grad_store import Factor


def grad_norm_of(engine: Engine, params: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
    """The norm of the reduced gradients of ``params`` over all ranks: 0-d, fp32 (fp64 of fp64). Collective.

    Raises:
        ValueError: a norm of a type that does not add up over parts.
    """
    if engine.looks_at_gradients:
        return torch.zeros((), device=engine.comm.device)
    return engine.sharded_grads.norms.total([engine.place_of(param) for param in params], norm_type)


def clip_by_norm(
    engine: Engine,
    params: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of ``params`` so that their norm is at most ``max_norm``. Collective.

    Returns:
        The norm before.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    norm = grad_norm_of(engine, params, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"the gradient norm is {norm.item()}: gradients cannot be clipped.")
    # As torch.nn.utils.clip_grad_norm_: no host synchronization, a factor of one where nothing is to be clipped.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    streams = engine.comm.streams
    on_host = functools.cache(lambda: Factor(*streams.to_host(factor)))  # one copy for all

    def is_left_to_its_step(bucket: Bucket, slots: set[int]) -> bool:
        """Whether a whole bucket on the host is multiplied later, by its step: the host waits for nothing here."""
        return len(slots) == len(bucket.params) and bucket.grad_store.scale_later(on_host)

    grads = dict(enumerate(_own_grads(engine, params, but=is_left_to_its_step)))
    for same in alike(grads):
        torch._foreach_mul_([grads[number] for number in same], factor.to(grads[same[0]].device))
    return norm


def clip_by_value(engine: Engine, params: Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamp the gradients of ``params`` to ``[-clip_value, clip_value]``."""
    for grad in _own_grads(engine, params):
        grad.clamp_(-clip_value, clip_value)


def _own_grads(
    engine: Engine, params: Iterable[nn.Parameter], but: Callable[[Bucket, set[int]], bool] = lambda *_: False
) -> list[Tensor]:
    """All that this rank holds of the reduced gradients of ``params``, to be changed in place: views.

    Args:
        but: says of a bucket, and its slots, that they are left out.
    """
    places = [] if engine.looks_at_gradients else [engine.place_of(param) for param in params]
    refuse_whole(places)
    engine.settle_gradients()  # and wait for steps under way, which own their gradients until they are over
    engine.sharded_grads.norms.forget()
    views = []
    for bucket, slots in slots_of(places).items():
        if not but(bucket, slots) and (grad := bucket.grad) is not None:
            views += views_of(grad, bucket.owned_fragments(), slots)
    return views


def overflowed(engine: Engine, params: Iterable[nn.Parameter]) -> bool:
    """Whether any rank holds a gradient of ``params`` that is not finite; checked where they rest. Collective."""
    if engine.looks_at_gradients:
        return False
    places = [engine.place_of(param) for param in params]
    engine.settle_gradients()
    engine.check_reduced(place.info.param for place in places)
    known, views = parts_of_shards(engine.buckets, slots_of(places), lambda store: store.all_finite())
    checks = [torch.stack([torch.isfinite(views[n]).all() for n in same]).all() for same in alike(views)]
    checks += [torch.stack(list(known.values())).all()] if known else []
    found = not all(map(bool, checks))  # on a GPU the host waits for each of these, so there are few
    # All ranks skip the step or none does. A rank that decided by its own shards would step apart from the others.
    return bool(engine.comm.max_(torch.tensor([found], dtype=torch.uint8)))
