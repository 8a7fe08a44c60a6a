"""Collects the gradients of one bucket on this rank in a local buffer, before they are reduced.

::

    store_grad        stores a gradient; on a device its copy waits for the bucket's last, so that one call copies all
    copy_in           copies waiting gradients into the buffer, times ``scale_on_arrival``
    buffer_to_reduce  returns the buffer, with zeros where no gradient has come; its sum is times ``scale_of_sum``

One of the two factors divides by the number of ranks and the loss scale; the other is 1 (``_choose_scales``). Gradients
narrower than their sum (bf16, summed in fp32) are sent without loss: they stay undivided in the buffer, and a
parameter's second gradient is stored outside of the buffer, in the sum's dtype.
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
    """Holds the gradients that one bucket has received, and tracks which are not reduced yet."""

    bucket: Bucket
    scale: float  # 1 / (number of ranks * loss scale)
    spare: SpareBuffers
    local: Tensor | None = None  # [numel] unreduced gradients in ``local_dtype``
    written: set[int] = field(default_factory=set)  # slots that have a gradient in ``local``
    batched_copy: bool = False  # copy a bucket's gradients into ``local`` in one call, after the last
    waiting: dict[int, Tensor] = field(default_factory=dict)  # gradients not yet copied, by slot
    keeps_wire_dtype: bool = False  # ``local`` holds one backward's gradients in autograd's dtype
    second_arrivals: dict[int, Tensor] = field(default_factory=dict)  # late gradients, in reduce_dtype
    arrived: set[int] = field(default_factory=set)  # slots with a gradient in this backward
    reduces: bool = True  # in this backward, and not only in a later one
    issued: bool = False  # reduced in this backward
    used: set[int] = field(default_factory=set)  # slots with a gradient on this rank since the last clear
    agreed: set[int] = field(default_factory=set)  # slots with a reduced gradient of any rank
    partial: set[int] = field(default_factory=set)  # slots that lack gradients of a backward that raised
    scale_on_arrival: float = field(init=False)  # factor for each gradient
    scale_of_sum: float = field(init=False)  # factor for the reduced sum
    local_dtype: torch.dtype = field(init=False)
    sent_dtype: torch.dtype = field(init=False)  # of the next buffer to reduce
    total_dtype: torch.dtype | None = field(init=False)  # of its sum if it travels by an all-to-all, else None
    _exchanges: bool = field(init=False)  # gradients travel by an all-to-all in autograd's dtype, divided afterwards

    def __post_init__(self) -> None:
        self._exchanges = self.bucket.dtypes.exchanged and self.bucket.comm.exchanges
        self._choose_dtypes()

    def begin(self, *, reduces: bool, fresh: bool) -> None:
        """Reset for a backward. ``reduces``: this backward reduces this bucket. ``fresh``: this backward reduces, and
        no gradients of earlier backwards (``no_sync``) wait for that reduction; equal on all ranks."""
        self.arrived, self.issued, self.reduces = set(), False, reduces
        self.keeps_wire_dtype = self._exchanges and (fresh or not self.bucket.plan.accumulates_locally)
        self._choose_dtypes()

    def _choose_dtypes(self) -> None:
        dtypes = self.bucket.dtypes
        self.local_dtype = dtypes.grad if self.bucket.plan.accumulates_locally else dtypes.reduce
        if self.keeps_wire_dtype:
            self.local_dtype = dtypes.wire
        narrow = self.keeps_wire_dtype or (self._exchanges and self.local_dtype == dtypes.compute)
        self.sent_dtype, self.total_dtype = (dtypes.wire, dtypes.reduce) if narrow else (dtypes.reduce, None)
        self._choose_scales()

    def _choose_scales(self) -> None:
        """Decide whether to multiply each gradient on arrival or the reduced sum by ``scale``. All ranks decide alike.

        Scaling the sum is cheaper, and exact for powers of two in dtypes with fp32's range (from 1e-38 to 1e38).
        """
        wide = torch.float16 not in (self.bucket.dtypes.reduce, self.local_dtype)
        later = self._exchanges or (self.batched_copy and wide and math.frexp(self.scale)[0] == 0.5)
        self.scale_on_arrival, self.scale_of_sum = (1.0, self.scale) if later else (self.scale, 1.0)

    def store_grad(self, slot: int, grad: Tensor) -> bool:
        """Store one parameter's gradient. Returns whether the bucket needs a second reduction for this gradient."""
        if grad.layout is not torch.strided:
            grad = grad.to_dense()  # sparse embedding gradients; shards are dense
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
            if self.batched_copy:
                self.waiting[slot] = grad
            else:
                self._add(slot, grad)
        self.used.add(slot)
        self.arrived.add(slot)
        return late

    def _place(self, local: Tensor, slot: int) -> Tensor:
        """Return a view of the elements of the parameter at ``slot`` in ``local``, in the parameter's shape."""
        info = self.bucket.params[slot]
        return local.as_strided(info.shape, info.strides, self.bucket.layout.slots[slot].start)

    def local_grads(self) -> dict[int, Tensor]:
        """Return this rank's unreduced gradients by slot: views of the local buffer, times ``scale_on_arrival``."""
        self.copy_in()
        return {} if self.local is None else {slot: self._place(self.local, slot) for slot in sorted(self.written)}

    def set_scale(self, scale: float) -> None:
        """Multiply the gradients of the next backwards by ``scale``."""
        if scale != self.scale:
            before, self.scale = self.scale_of_sum, scale
            self._choose_scales()
            if self.local is not None and before != self.scale_of_sum:
                self.local.mul_(before / self.scale_of_sum)

    def _add(self, slot: int, grad: Tensor) -> None:
        if self.local is None:
            # Uninitialized: ``buffer_to_reduce`` zeroes what no gradient has filled.
            self.local = self.spare.take_buffer(self.bucket.layout.numel, self.local_dtype, grad.device)
        view = self._place(self.local, slot)
        if slot in self.written:
            view.add_(grad, alpha=self.scale_on_arrival)
        else:
            _put(view, grad, self.scale_on_arrival)
            self.written.add(slot)

    def copy_in(self) -> None:
        """Copy the gradients in ``waiting`` into the local buffer, in one call for all."""
        waiting, self.waiting = self.waiting, {}
        if len(waiting) < 2:
            for slot, grad in waiting.items():
                self._add(slot, grad)
            return
        if self.local is None:
            device = next(iter(waiting.values())).device
            self.local = self.spare.take_buffer(self.bucket.layout.numel, self.local_dtype, device)
        scale = self.scale_on_arrival
        views = {slot: self._place(self.local, slot) for slot in waiting}
        new = [slot for slot in waiting if slot not in self.written]
        if scale == 1.0 and new:
            torch._foreach_copy_([views[slot] for slot in new], [waiting[slot] for slot in new])
        else:
            for slot in new:
                _put(views[slot], waiting[slot], scale)
        if more := [slot for slot in waiting if slot in self.written]:
            torch._foreach_add_([views[slot] for slot in more], [waiting[slot] for slot in more], alpha=scale)
        self.written.update(waiting)

    def buffer_to_reduce(self) -> Tensor:
        """Return a buffer to reduce, zero where no gradient came. A second call returns one with the late gradients."""
        bucket, dtype = self.bucket, self.sent_dtype
        self.copy_in()
        full = self.local
        # Zeros: other ranks reduce the bucket and would wait for this rank.
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
        # Released here: the reduction keeps the buffer as long as a stream reads it.
        self.local = None
        self.written, self.issued = set(), True
        self.sent_dtype, self.total_dtype = bucket.dtypes.reduce, None  # of late gradients
        return full if full.dtype == dtype else full.to(dtype)

    def drop(self) -> None:
        self.partial = set(self.used)
        self.local, self.written, self.waiting, self.second_arrivals = None, set(), {}, {}

    def forget(self, slots: Iterable[int]) -> None:
        """Drop local and reduced gradients of ``slots``, after the user has set ``param.grad`` to None."""
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
            self.local = None  # else its remains would be reduced with the next backward
        if self.agreed:
            for slot in gone:
                self._zero_reduced(slot)
        else:
            self.bucket.grad_store.clear()

    def replace(self, slot: int, grad: Tensor) -> None:
        """Store ``grad``, whole, in the place of this rank's unreduced gradients of ``slot``."""
        self.copy_in()
        self.written.discard(slot)
        self.second_arrivals.pop(slot, None)
        self._add(slot, grad)
        self.used.add(slot)

    def zero(self, slot: int) -> None:
        """Zero the gradient of ``slot``, for ``param.grad.zero_()``. A step uses these zeros; after None it skips."""
        self.written.discard(slot)
        self.partial.discard(slot)
        self._zero_reduced(slot)

    def _zero_reduced(self, slot: int) -> None:
        """Zero also the padding that follows, which clipping of gradients that were not finite has made NaN."""
        (low, high), layout = self.bucket.owned_range, self.bucket.layout
        stop = layout.slots[slot + 1].start if slot + 1 < len(layout.slots) else layout.numel
        if (grad := self.bucket.grad) is not None:
            grad[max(layout.slots[slot].start - low, 0) : max(min(stop, high) - low, 0)].zero_()


def _put(view: Tensor, grad: Tensor, scale: float) -> None:
    """Write ``grad * scale`` into ``view``. The product is computed in the wider of the two dtypes."""
    exact = math.frexp(scale)[0] == 0.5 and grad.dtype is torch.bfloat16
    if scale == 1.0:
        view.copy_(grad)
    elif grad.dtype == view.dtype or grad.itemsize > view.itemsize or exact:
        torch.mul(grad, scale, out=view)
    else:
        view.copy_(grad).mul_(scale)  # in the gradient's narrower dtype the product would be inexact
