"""The gradients of one bucket on this rank, before they are reduced: one local buffer, and who has put what into it.

::

    take      a gradient waits; on a device until the last of its bucket has come, for one call instead of many
    copy_in   those that wait go to their places, divided by the number of ranks (and by the loss scale)
    complete  zeros where none came; the buffer is handed out to be reduced

Where gradients rest replicated (stages 0 and 1) the buffer itself accumulates until a backward synchronizes.

Where gradients are narrower than their sum (made in bf16, summed in fp32) the buffer holds them as autograd has made
them: not divided, which the sum is, and not added up. Then they may travel in their own dtype, without the loss of a
bit. A second gradient of a parameter in one backward waits apart, and is reduced in fp32 at its end. All of that is so
under each ``zero.comm.grad_comm_dtype``, so that they have the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_zero.comm.reduction import SpareBuffers
from lightning_zero.engine.units.bucket import Bucket


@dataclass(slots=True, eq=False)
class BucketGrads:
    """The gradients that one bucket has received, and which of them are not reduced yet."""

    bucket: Bucket
    scale: float  # 1 / number of ranks (averages, as DDP does, before anything is added up) / scale of the loss
    spare: SpareBuffers
    local: Tensor | None = None  # [numel] unreduced gradient: reduce_dtype, or grad_dtype where it accumulates
    written: set[int] = field(default_factory=set)  # slots of ``local`` that hold a gradient
    batched_copy: bool = False  # gradients wait until the bucket has all, and go into ``local`` in one call
    waiting: dict[int, Tensor] = field(default_factory=dict)  # those, by slot, as autograd has made them
    keeps_wire_dtype: bool = False  # ``local`` holds gradients of one backward, as autograd has made them
    second_arrivals: dict[int, Tensor] = field(default_factory=dict)  # that cannot be there too, by slot: reduce_dtype
    arrived: set[int] = field(default_factory=set)  # slots with a gradient of this backward
    issued: bool = False  # reduced in this backward
    used: set[int] = field(default_factory=set)  # slots with a gradient on this rank since they were last cleared
    agreed: set[int] = field(default_factory=set)  # ... on any rank, as far as gradients are reduced
    partial: set[int] = field(default_factory=set)  # slots that lack some of a backward that has raised
    _exchanges: bool = field(init=False)  # gradients are reduced as made, by an all-to-all, and divided afterwards

    def __post_init__(self) -> None:
        self._exchanges = self.bucket.dtypes.exchanged and self.bucket.comm.exchanges

    @property
    def accumulates(self) -> bool:
        return self.bucket.plan.accumulates_locally

    def begin(self, *, fresh: bool) -> None:
        """A backward starts.

        Args:
            fresh: it reduces, and none that did not has come since the last that did: the same on all ranks.
        """
        self.arrived, self.issued = set(), False
        self.keeps_wire_dtype = self._exchanges and (fresh or not self.accumulates)

    def take(self, slot: int, grad: Tensor) -> bool:
        """Move one parameter's gradient into the local buffer, or keep it until the others have come.

        Returns:
            Whether it is to be reduced at the end of the backward, behind what ``complete`` hands out first.
        """
        if grad.layout is not torch.strided:
            grad = grad.to_dense()  # sparse embedding gradients: shards are dense
        fits = not self.keeps_wire_dtype or (slot not in self.arrived and grad.dtype == self.bucket.dtypes.compute)
        late = self.issued or not fits
        if self.keeps_wire_dtype and late:
            if slot in self.second_arrivals:
                self.second_arrivals[slot].add_(grad)
            else:
                self.second_arrivals[slot] = grad.to(self.bucket.dtypes.reduce, copy=True)
        else:
            if slot in self.waiting:
                self.copy_in()
            self.waiting[slot] = grad
            if not self.batched_copy:
                self.copy_in()
        self.used.add(slot)
        self.arrived.add(slot)
        return late

    def _place(self, local: Tensor, slot: int) -> Tensor:
        """The part of the local buffer that is one parameter's: a view of its shape."""
        info = self.bucket.params[slot]
        return local.as_strided(info.shape, info.strides, self.bucket.layout.slots[slot].start)

    def local_grads(self) -> dict[int, Tensor]:
        """What is not reduced yet, by slot: gradients as autograd has made them, times ``scale / factor``."""
        self.copy_in()
        return {} if self.local is None else {slot: self._place(self.local, slot) for slot in sorted(self.written)}

    @property
    def factor(self) -> float:
        """What the sum over ranks is still to be multiplied by: ``scale``, where gradients are summed as autograd has
        made them, and where that gives what it gives before.

        It does where the product is exact, and it costs less there, for a slice has fewer elements: by a power of two,
        in a dtype of the range of fp32. (At the ends of that range, below 1e-38 and above 1e38, digits may differ.) It
        is the same on all ranks, also on those that have no gradient.
        """
        if self._exchanges:
            return self.scale
        wide = torch.float16 not in (self.bucket.dtypes.reduce, self._local_dtype)
        return self.scale if self.batched_copy and wide and math.frexp(self.scale)[0] == 0.5 else 1.0

    def set_scale(self, scale: float) -> None:
        """Multiply the gradients of the next backwards by another ``scale``."""
        if scale != self.scale:
            before, self.scale = self.factor, scale
            if self.local is not None and before != self.factor:
                self.local.mul_(before / self.factor)

    @property
    def _local_dtype(self) -> torch.dtype:
        dtypes = self.bucket.dtypes
        if self.keeps_wire_dtype:
            return dtypes.wire
        return dtypes.grad if self.accumulates else dtypes.reduce

    @property
    def total_dtype(self) -> torch.dtype | None:
        """Of the sum of what ``complete`` hands out next, where that travels by an all-to-all."""
        dtypes = self.bucket.dtypes
        narrow = self.keeps_wire_dtype or (self._exchanges and self._local_dtype == dtypes.compute)
        return dtypes.reduce if narrow and not self.issued else None

    @property
    def sent_dtype(self) -> torch.dtype:
        """Of what ``complete`` hands out next."""
        return self.bucket.dtypes.reduce if self.total_dtype is None else self.bucket.dtypes.wire

    def copy_in(self) -> None:
        """Move the gradients that wait into the local buffer, in one call for all."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, {}
        if self.local is None:
            # Not zeros, which would be written twice: ``complete`` zeroes what no gradient has filled.
            device = next(iter(waiting.values())).device
            self.local = self.spare.take(self.bucket.layout.numel, self._local_dtype, device)
        now = 1.0 if self.factor != 1.0 else self.scale
        if len(waiting) == 1:
            ((slot, grad),) = waiting.items()
            view = self._place(self.local, slot)
            if slot in self.written:
                view.add_(grad, alpha=now)
            else:
                _put(view, grad, now)
            self.written.add(slot)
            return
        views = {slot: self._place(self.local, slot) for slot in waiting}
        new = [slot for slot in waiting if slot not in self.written]
        if now == 1.0 and new:
            torch._foreach_copy_([views[slot] for slot in new], [waiting[slot] for slot in new])
        else:
            for slot in new:
                _put(views[slot], waiting[slot], now)
        if more := [slot for slot in waiting if slot in self.written]:
            torch._foreach_add_([views[slot] for slot in more], [waiting[slot] for slot in more], alpha=now)
        self.written.update(waiting)

    def complete(self) -> Tensor:
        """Hand out the local buffer to be reduced, with zeros wherever no gradient came; in a backward that has handed
        it out before, what has come since."""
        bucket, dtype = self.bucket, self.sent_dtype
        self.copy_in()
        full = self.local
        # No gradient on this rank: zeros take part all the same. Other ranks reduce the bucket, and would wait for it.
        if full is None:
            full = torch.zeros(bucket.layout.numel, dtype=dtype, device=bucket.comm.device)
        else:
            empty = [full[low:high] for low, high in bucket.gaps]
            for place in bucket.layout.slots:
                if place.index not in self.written:
                    empty.append(full[place.start : place.start + place.numel])
            if empty:
                torch._foreach_zero_(empty)
        if self.issued:
            for slot, grad in self.second_arrivals.items():
                self._place(full, slot).copy_(grad)
            self.second_arrivals = {}
        # Let go of: the reduction keeps the buffer as long as a stream reads it, and no longer.
        self.local = None
        self.written = set()
        return full if full.dtype == dtype else full.to(dtype)

    def drop(self) -> None:
        """Drop what is not reduced: a backward has raised."""
        self.partial = set(self.used)
        self.local, self.written, self.waiting, self.second_arrivals = None, set(), {}, {}

    def forget(self, slots: Iterable[int]) -> None:
        """Drop these parameters' gradients, because the user has cleared them."""
        gone = set(slots) & (self.used | self.agreed)
        if not gone:
            return
        self.partial -= gone
        self.used -= gone
        self.agreed -= gone
        self.written -= gone
        for slot in gone:
            self.waiting.pop(slot, None)
            self.second_arrivals.pop(slot, None)
        if not self.written:
            self.local = None  # else what is left in it would be reduced with the next backward
        if self.agreed:
            for slot in gone:
                self._zero_reduced(slot)
        else:
            self.bucket.grad_store.clear()

    def zero(self, slot: int) -> None:
        """Zero a parameter's gradient, because the user did. It still counts as a gradient, unlike None."""
        self.written.discard(slot)
        self.partial.discard(slot)
        self._zero_reduced(slot)

    def _zero_reduced(self, slot: int) -> None:
        if (fragment := self.bucket.grad_fragment(slot)) is not None:
            fragment.values.zero_()


def _put(view: Tensor, grad: Tensor, scale: float) -> None:
    """Write ``grad * scale`` into ``view``: computed in the wider dtype of the two, and rounded to that of the view."""
    exact = math.frexp(scale)[0] == 0.5 and grad.dtype is torch.bfloat16
    if scale == 1.0:
        view.copy_(grad)
    elif grad.dtype == view.dtype or grad.itemsize > view.itemsize or exact:
        torch.mul(grad, scale, out=view)
    else:
        view.copy_(grad).mul_(scale)  # a product rounded to the gradient's lower dtype would be inexact
