"""Changes of sharded gradients in place: each element by itself, by numbers that are the same for all of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.comm.streams import Streams
from lightning_zero.engine.passes.grad_norms import alike
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.grad_store import Factor
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.planning.layout import cut_runs

_LINEAR = {"mul_", "div_"}


class Change(NamedTuple):
    """What users' code does to gradients: a method of tensors that works in place, and its arguments.

    Attributes:
        numbers: each a number, a 0-d tensor of this change's own, or None.
    """

    method: str
    numbers: tuple[Any, ...]


class GradChanges:
    """Makes changes out of what users' code does to one gradient after the other, and makes them.

    Attributes:
        any: whether there are some that are not made yet.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.any = False
        self._last: tuple[tuple[Any, ...], tuple[Any, ...], Change] | None = None  # what it is, of what, the change

    def change_of(self, info: ParamInfo, method: str, numbers: Sequence[Any]) -> Change:
        """The change of one gradient: the same object for gradients that the same is done to, one after the other.

        Raises:
            RuntimeError: the gradient lacks some of its backwards, or a step has taken it already.
        """
        self._refuse(info)
        # Gradients rest without the scale of the loss.
        shown = 1.0 if method in _LINEAR else self._reducer.shown_scale(id(info.param))
        what = (method, shown, *(n if not isinstance(n, Tensor) else (id(n), n._version) for n in numbers))
        if self._last is None or self._last[0] != what:
            own = tuple(
                n.detach().clone() if isinstance(n, Tensor) else n if n is None or shown == 1.0 else n / shown
                for n in numbers
            )
            # The numbers are kept, too: another tensor could get the id of one that is gone.
            self._last = (what, tuple(numbers), Change(method, own))
        self.any = True
        return self._last[2]

    def make(self, change: Change, wanted: Mapping[Bucket, set[int]]) -> None:
        """Make a change to the reduced gradients of ``wanted`` slots."""
        self._last = None
        first = change.numbers[0]
        if change.method == "mul_" and isinstance(first, Tensor):
            scale(wanted, first, self._reducer.comm.streams)
            return
        for grad in views_of(wanted):
            numbers = (n.to(grad.device) if isinstance(n, Tensor) else n for n in change.numbers)
            getattr(grad, change.method)(*numbers)

    def _refuse(self, info: ParamInfo) -> None:
        self._reducer.refuse_partial()
        if self._reducer.unreduced:
            raise RuntimeError(
                f"the gradient of {info.fqn} cannot be changed or clipped after a backward inside no_sync(): it is not "
                "reduced over the ranks yet. Change gradients after the last backward before the step, outside of "
                "no_sync() (on_before_optimizer_step; sync_grad=True)."
            )


def scale(wanted: Mapping[Bucket, set[int]], factor: Tensor, streams: Streams) -> None:
    """Multiply the reduced gradients of ``wanted`` slots by ``factor`` (0-d), wherever they rest.

    Whole buckets on the host are multiplied later, by their steps: the host waits for nothing here.
    """
    on_host = functools.cache(lambda: Factor(*streams.to_host(factor)))  # one copy for all

    def scales_itself(bucket: Bucket) -> bool:
        return len(wanted[bucket]) == len(bucket.params) and bucket.grad_store.scale_later(on_host)

    grads = dict(enumerate(views_of({b: slots for b, slots in wanted.items() if not scales_itself(b)})))
    for places in alike(grads).values():
        same = [grads[place] for place in places]
        torch._foreach_mul_(same, factor.to(same[0].device))


def views_of(wanted: Mapping[Bucket, set[int]]) -> list[Tensor]:
    """All that this rank holds of the reduced gradients of ``wanted`` slots, as views (replicated ones whole)."""
    result = []
    for bucket, slots in wanted.items():
        if (grad := bucket.grad) is not None:
            fragments = bucket.owned_fragments()
            keys = [True if f.index in slots else None for f in fragments]
            result += [grad[run.start : run.stop] for _, run in cut_runs(fragments, keys)]
    return result
