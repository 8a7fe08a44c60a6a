"""``gather()``: lets parameters show whole masters for a while, and keeps what is written to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor, nn

from lightning_zero.engine.assembly import Assembly
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.home import opened
from lightning_zero.engine.units.param import values_changed
from lightning_zero.engine.units.unit import State
from lightning_zero.engine.whole.host_copy import set_aside
from lightning_zero.engine.whole.state_dicts import take_writes_over
from lightning_zero.optimizers.state_trees import same_bits


@contextlib.contextmanager
def show_full(
    engine: Assembly, params: Iterable[nn.Parameter], *, from_rank: int | None = None, grads: bool = False
) -> Iterator[None]:
    """Let ``params``, and the others of their buckets, hold full masters inside: :func:`lightning_zero.gather`.

    Values that are written to them inside are kept. All ranks enter, and write the same values unless ``from_rank``
    names the one whose values count. Where all parameters of the module are shown, the module is plain inside: it is
    without our hooks.
    """
    # On a group of its own, before any message that a rank which is elsewhere could take for another of its own.
    engine.comm.meet(None, "gather(), which all ranks must enter")
    with set_aside(engine):
        yield from _shown(engine, params, from_rank, grads)


def _shown(engine: Assembly, params: Iterable[nn.Parameter], from_rank: int | None, grads: bool) -> Iterator[None]:
    wanted = {engine.place_of(p).bucket for p in params}
    if (from_rank is not None or grads) and wanted & set(engine.shown):
        raise RuntimeError(
            "gather(from_rank=) and gather(grads=True) cannot be nested in another gather() of the same parameters. "
            "Give these arguments to the outer one."
        )
    buckets = [b for b in engine.buckets if b in wanted and not b.is_plain]
    shown: dict[Bucket, tuple[Tensor, Tensor | None]] = {}
    put_back: Callable[[], None] = lambda: None  # noqa: E731
    try:
        _show(engine, buckets, grads, shown)
        if buckets and len(engine.shown) == len(engine.buckets):
            put_back = engine.passes.hooks.lift_off()
        yield
        _refuse_replaced(engine)
        _write_back(shown, from_rank)
    finally:  # also after an error on the way in: buckets that stayed plain could never be stepped again
        put_back()
        _hide(engine, shown)


def _refuse_replaced(engine: Assembly) -> None:
    """Raise where the module has got other parameter objects or other shapes: those would not be trained."""
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
def _show(
    engine: Assembly, buckets: list[Bucket], grads: bool, shown: dict[Bucket, tuple[Tensor, Tensor | None]]
) -> None:
    """Show ``buckets``, and note in ``shown`` what each of them shows: full masters, and full gradients if wanted."""
    # Masters are read below: steps must be over, and what users wrote to the copies must be in them, agreed on.
    take_writes_over(engine)
    engine.forget_zeroed()
    if grads:
        engine.check_reduced(info.param for bucket in buckets for info in bucket.params)
    for bucket in buckets:
        full = bucket.full_master()
        full_grad = full_reduced_grad(bucket) if grads else None
        shown[bucket] = (full, full_grad)
        bucket.show_plain(full)
        for info in bucket.params:
            if full_grad is not None and info.param.grad is not None:
                part = bucket.part_of(full_grad, info)
                info.param.grad = part.to(info.param.dtype) if part.dtype != info.param.dtype else part


@outside_autograd
def _write_back(shown: Mapping[Bucket, tuple[Tensor, Tensor | None]], from_rank: int | None) -> None:
    for bucket, (full, full_grad) in shown.items():
        replaced = []
        for info in bucket.params:
            # The user has assigned another tensor to ``.data``: what it holds is not in ``full`` yet.
            part = bucket.part_of(full, info)
            if info.param.data_ptr() != part.data_ptr() and info.param.shape == info.shape:
                part.copy_(info.param.data)
                replaced.append(info)
        if from_rank is not None:
            bucket.comm.broadcast(full, from_rank)
        values_changed(replaced if from_rank is None else bucket.params)
        low, high = bucket.owned_range
        with opened(bucket.home) as master:
            own = full[low:high].to(master.device)
            if not same_bits(master, own):  # else there is nothing to write to a file, or to make whole anew
                with opened(bucket.home, changed=True):
                    master.copy_(own)
                    if bucket.reshards:
                        bucket.push()
        # The compute parameters, too, where they are here now. All of them: no gather follows that would bring the
        # other ranks' slices.
        if not bucket.reshards or bucket.full.allocated:
            bucket.full.data.copy_(full)
        bucket.node_shard.becomes(full)
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
            # What was written inside is in the masters, or was dropped with an exception; it is no write to take over.
            engine.writes.forget(bucket)
            bucket.hide_plain(gathered=not bucket.reshards or unit.state is State.GATHERED)
            if shown[bucket][1] is not None:
                engine.sentinels.place(info for info in bucket.params if info.param.grad is not None)


def full_reduced_grad(bucket: Bucket) -> Tensor | None:
    """On all ranks: the reduced gradient of a whole bucket [layout.numel], a new tensor; None where there is none."""
    if bucket.grad is None:
        return None
    return bucket.gathered([(0, bucket.grad)], bucket.grad.dtype, "gradients")
