"""Collects gradients that autograd has computed, and reduces them over the ranks into shards, in a fixed order.

::

    hook(p)      store_grad copies p.grad, times ``scale_on_arrival``, into the bucket's local buffer. On a device
                 gradients wait for the bucket's last gradient, and copy_in copies all of them in one call
    bucket full  -> ready -> (all buckets before it in the order are issued) -> buffer_to_reduce -> Communicator.reduce,
                 which multiplies the sum by ``factor`` = ``scale_of_sum``
    finish       adds the reduced sum to the bucket's GradStore, and drops the local buffer

A rank without gradients for a bucket reduces zeros, because other ranks may have gradients.

:class:`BucketGrads` computes the factor that divides by the number of ranks and the loss scale. The factor is applied
once: when a gradient arrives (``scale_on_arrival``), or by ``Communicator.reduce`` (``scale_of_sum``); the other scale
is 1. Gradients narrower than their sum (bf16, summed in fp32) are sent without loss of bits: the local buffer keeps
them undivided, and a parameter's second gradient is stored outside of the buffer, in the sum's dtype.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.reduction import Reduction, SpareBuffers
from lightning_zero.device import recording
from lightning_zero.engine.torch_modes import outside_autograd, without_history
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.planning.activations import KEPT_BUFFERS, KEPT_BUFFERS_NBYTES


@dataclass(eq=False)
class BucketGrads:
    """Holds this rank's unreduced gradients of one bucket, and tracks which parameters have gradients."""

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

    def __post_init__(self) -> None:
        # Whether ranks send gradients by an all-to-all in autograd's dtype, and divide the sum afterwards.
        self._exchanges = self.bucket.dtypes.exchanged and self.bucket.comm.exchanges
        self._choose_dtypes()

    def begin(self, *, reduces: bool, fresh: bool) -> None:
        """Reset for a backward. ``reduces``: this backward reduces this bucket. ``fresh``: this backward reduces, and
        no gradients of earlier backwards in ``no_sync`` await their reduction; equal on all ranks."""
        self.arrived, self.issued, self.reduces = set(), False, reduces
        self.keeps_wire_dtype = self._exchanges and (fresh or not self.bucket.plan.accumulates_locally)
        self._choose_dtypes()

    def _choose_dtypes(self) -> None:
        """Set ``local_dtype``, ``sent_dtype`` (the dtype of the next buffer to reduce) and ``total_dtype`` (the dtype
        of the sum of these buffers over ranks if ranks use an all-to-all, else None)."""
        dtypes = self.bucket.dtypes
        self.total_dtype: torch.dtype | None
        self.local_dtype = dtypes.grad if self.bucket.plan.accumulates_locally else dtypes.reduce
        if self.keeps_wire_dtype:
            self.local_dtype = dtypes.wire
        narrow = self.keeps_wire_dtype or (self._exchanges and self.local_dtype == dtypes.compute)
        self.sent_dtype, self.total_dtype = (dtypes.wire, dtypes.reduce) if narrow else (dtypes.reduce, None)
        self._choose_scales()

    def _choose_scales(self) -> None:
        """Set ``scale_on_arrival``, the factor of each arriving gradient, and ``scale_of_sum``, the factor of the
        reduced sum. The same one of the two is ``scale`` on all ranks; the other is 1. Scaling the sum is cheaper, and
        exact for powers of two in dtypes with fp32's range (from 1e-38 to 1e38)."""
        wide = torch.float16 not in (self.bucket.dtypes.reduce, self.local_dtype)
        later = self._exchanges or (self.batched_copy and wide and math.frexp(self.scale)[0] == 0.5)
        self.scale_on_arrival, self.scale_of_sum = (1.0, self.scale) if later else (self.scale, 1.0)

    def store_grad(self, slot: int, grad: Tensor) -> bool:
        """Store or add ``grad`` for the parameter at ``slot``. Return whether the bucket needs a second reduction in
        this backward because of this gradient."""
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
        """Return this rank's unreduced gradients by slot: views of the local buffer, scaled by ``scale_on_arrival``."""
        self.copy_in()
        return {} if self.local is None else {slot: self._place(self.local, slot) for slot in sorted(self.written)}

    def set_scale(self, scale: float) -> None:
        """Multiply the gradients of later backwards by ``scale``, in place of the earlier factor."""
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
        """Copy or add the gradients in ``waiting`` to the local buffer, in one call for all of them if possible."""
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
        """Return the buffer to reduce, [numel], with zeros where no gradient has arrived. A second call in a backward
        returns a buffer with the gradients that arrived after the first call."""
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
        """Drop the unreduced and reduced gradients of ``slots``, because the user has set ``param.grad`` to None."""
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
            self.local = None  # else cleared gradients would be reduced with the next backward
        if self.agreed:
            for slot in gone:
                self._zero_reduced(slot)
        else:
            self.bucket.grad_store.clear()

    def replace(self, slot: int, grad: Tensor) -> None:
        """Replace this rank's unreduced gradient of the parameter at ``slot`` by ``grad``, which has the parameter's
        shape. This method scales ``grad`` like an arriving gradient."""
        self.copy_in()
        self.written.discard(slot)
        self.second_arrivals.pop(slot, None)
        self._add(slot, grad)
        self.used.add(slot)

    def zero(self, slot: int) -> None:
        """Zero the gradient of ``slot``, for ``param.grad.zero_()``. The next step uses a zero gradient."""
        self.written.discard(slot)
        self.partial.discard(slot)
        self._zero_reduced(slot)

    def _zero_reduced(self, slot: int) -> None:
        """Zero the reduced gradient of ``slot`` and the padding after it, which clipping may have made NaN."""
        (low, high), layout = self.bucket.owned_range, self.bucket.layout
        stop = layout.slots[slot + 1].start if slot + 1 < len(layout.slots) else layout.numel
        if (grad := self.bucket.grad) is not None:
            grad[max(layout.slots[slot].start - low, 0) : max(min(stop, high) - low, 0)].zero_()


class Reducer:
    """Issues reductions in one order on all ranks and adds their results to the gradient stores."""

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator, max_in_flight_nbytes: int) -> None:
        """``max_in_flight_nbytes``: the most bytes of reductions in flight, except where a wait could deadlock."""
        self.comm = comm
        self.pass_begins(one_path=False)
        nbytes = max((b.layout.numel * b.dtypes.reduce.itemsize for b in buckets), default=0)
        self.spare = SpareBuffers(min(KEPT_BUFFERS * nbytes, KEPT_BUFFERS_NBYTES))
        # On a device one kernel copies all gradients of a bucket. On the host a gradient is copied while it is still in
        # the cache.
        self.grads: dict[Bucket, BucketGrads] = {
            b: BucketGrads(b, 1 / b.comm.ranks.grad_divisor, self.spare, batched_copy=comm.streams.are_there)
            for b in buckets
        }
        self.unreduced = False  # a backward inside ``no_sync`` came after the last reduction; equal on all ranks
        self.synchronize = True
        self.loss_scale = 1.0
        self._unscaled: set[int] = set()  # ids of parameters
        self._waiting: set[Bucket] = set()  # buckets with unreduced gradients of ``no_sync``; equal on all ranks
        self.plans_changed()
        self._expected: dict[Bucket, int] = {}  # number of parameters that require a gradient
        self._in_flight: list[tuple[Bucket, Reduction]] = []
        self._second_half: list[tuple[Bucket, Reduction]] = []
        self._flying_nbytes = 0
        self._max_in_flight_nbytes = max_in_flight_nbytes

    def pass_begins(self, *, one_path: bool) -> None:
        """Reset the counts of reductions for a pass. ``one_path``: all ranks are expected to use the same units."""
        self.issued = self.issued_everywhere = 0  # by this rank; at least so many by each rank
        self.one_path = one_path

    def plans_changed(self) -> None:
        """Forget the learned orders of reductions, because buckets have new plans. Keeps gradients."""
        self._gathers_in_backward = any(bucket.plan.reshards for bucket in self.grads)
        self.order: list[Bucket] = list(reversed(list(self.grads)))
        self._orders: dict[str, list[Bucket]] = {}  # learned, by kind of pass
        self._lagging: dict[str, set[Bucket]] = {}  # completed by some rank only at its end

    def begin(self, key: str) -> None:
        """Reset for a backward. ``key``: the key of its pass. Passes with the same key reduce in the same order."""
        self.unreduced |= not self.synchronize
        self._key = key
        self.order = self._orders.get(key, self.order)
        for bucket, grads in self.grads.items():
            self._expected[bucket] = sum([info.param.requires_grad for info in bucket.params])
            grads.begin(reduces=self.synchronize or not bucket.plan.accumulates_locally, fresh=not self.unreduced)
        self._late: set[Bucket] = set()  # with a second gradient of a parameter
        self._lagging_here: set[Bucket] = set()
        self._waiting |= {b for b, grads in self.grads.items() if self._expected[b] and not grads.reduces}
        # If all parameters of a waiting bucket are frozen by now, this backward brings nothing more for the bucket.
        self._ready = {b for b in self._waiting if self.synchronize and not self._expected[b]}
        self.completed: list[Bucket] = []  # in the order of becoming ready in this backward
        self._next = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        previous, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = previous

    def set_loss_scale(self, scale: float) -> None:
        """Divide the gradients of later backwards by ``scale``, the factor by which the user multiplies the loss."""
        self.loss_scale, self._unscaled = scale, set()
        for bucket, grads in self.grads.items():
            grads.set_scale(1.0 / (bucket.comm.ranks.grad_divisor * scale))

    def unscale(self, params: Iterable[nn.Parameter]) -> None:
        """Let ``param.grad`` of ``params`` show gradients without loss scale, until the next :meth:`set_loss_scale`."""
        self._unscaled |= {id(param) for param in params}

    def shown_scale(self, param_id: int) -> float:
        """Return the factor that turns a stored gradient into ``param.grad``: the loss scale, which stored gradients do
        not contain, or 1 after :meth:`unscale`. ``param_id``: the parameter's ``id``."""
        return 1.0 if param_id in self._unscaled else self.loss_scale

    def local_scale(self, bucket: Bucket) -> float:
        """Return the factor that turns a bucket's local buffer into this rank's gradients of the unscaled loss."""
        grads = self.grads[bucket]
        return 1.0 / grads.scale_on_arrival / self.loss_scale

    @without_history
    def accept_grad(self, bucket: Bucket, slot: int, grad: Tensor) -> None:
        """Store ``grad``, which autograd computed for the parameter at ``slot``. Issue reductions that are ready."""
        grads = self.grads[bucket]
        late = grads.store_grad(slot, grad)
        if not grads.reduces:
            if len(grads.arrived) == self._expected[bucket]:
                grads.copy_in()
            return
        if late:
            # A second gradient (a module used twice under checkpointing). All ranks agree on these at the end.
            self._late.add(bucket)
        if not grads.issued and len(grads.arrived) == self._expected[bucket] and bucket not in self._ready:
            self._set_ready(bucket)
            self._pump()

    def flush(self) -> None:
        """Issue all remaining reductions in order, at the end of a backward. Collective."""
        for bucket in self.order:
            if not self.grads[bucket].reduces:
                self.grads[bucket].copy_in()
            elif self._expected[bucket] and bucket not in self._ready:
                self._set_ready(bucket)
                self._lagging_here.add(bucket)
        self._pump()

    def end(self, told: Sequence[int] = ()) -> Sequence[int]:
        """Reduce late gradients and wait for all reductions of the backward. Return the maxima over ranks of ``told``
        (integers from 0 to 255, sent in the same message), or () if no bucket was reduced. Collective."""
        reduced = [bucket for bucket, grads in self.grads.items() if grads.reduces]
        if not reduced:
            return ()
        late, maxima = self._agree(reduced, told)
        for bucket in late:
            self._issue(bucket)
        while self._in_flight:
            self._land()
        # After all first halves, because earlier waits would delay reductions.
        for bucket, reduction in self._second_half:
            self._add(bucket, reduction)
        self._second_half = []
        if self._key not in self._orders:
            self._learn_order()
        # Buckets that some rank completes only at the end of its backward come last. They would hold up the others.
        self._orders[self._key].sort(key=self._lagging[self._key].__contains__)
        self.unreduced &= not self.synchronize
        if self.synchronize:
            self._waiting.clear()
        return maxima

    def refuse_unreduced(self, places: Iterable[Place]) -> None:
        """Raise RuntimeError on all ranks if any rank has unreduced gradients at ``places``. Collective."""
        places = list(places)
        self.refuse_partial(places)
        if self.unreduced:
            waiting = any(place.info.slot in self.grads[place.bucket].written for place in places)
            if self.comm.max_(torch.tensor([waiting], dtype=torch.uint8)).item():
                raise RuntimeError(
                    "gradients of backwards inside no_sync() have not been reduced over the ranks. Run the last "
                    "backward before a step, a norm, clipping or gather(grads=True) outside of no_sync() "
                    "(sync_grad=True)."
                )

    def refuse_partial(self, places: Iterable[Place] | None = None) -> None:
        """Raise RuntimeError if a gradient at ``places`` (None: any) is incomplete because a backward raised."""
        partial = [bucket for bucket, grads in self.grads.items() if grads.partial]
        if partial and places is not None:
            partial = [b for b, info in places if info.slot in self.grads[b].partial]
        if partial:
            raise RuntimeError(
                "a backward has raised before its end, and the gradients that were there before it, or came in it, are "
                "not whole. Clear them (optimizer.zero_grad()), and run all backwards of the step again."
            )

    def _agree(self, reduced: Sequence[Bucket], told: Sequence[int]) -> tuple[list[Bucket], Sequence[int]]:
        """For each bucket in ``reduced``, set ``agreed`` to the slots that have a gradient on any rank. Return (buckets
        with late gradients on any rank in the order of reductions, maxima of ``told`` over ranks). Collective."""
        # All ranks' vectors need one length and order, so they cover all slots of all synchronized buckets.
        lagging = self._lagging.setdefault(self._key, set())
        flags: list[int] = [*told]
        for bucket in reduced:
            flags += [bucket in self._late, bucket in self._lagging_here]
            flags += [slot in self.grads[bucket].used for slot in range(len(bucket.params))]
        maxima = self.comm.max_(torch.tensor(flags, dtype=torch.uint8)).tolist()
        agreed, late = iter(maxima[len(told) :]), []
        for bucket in reduced:
            if next(agreed):
                late.append(bucket)
            if next(agreed):
                lagging.add(bucket)
            grads = self.grads[bucket]
            grads.agreed = {slot for slot in range(len(bucket.params)) if next(agreed)}
            grads.used |= grads.agreed
        return sorted(late, key=self.order.index), maxima[: len(told)]

    def _learn_order(self) -> None:
        """Set the order of reductions for later passes of the same kind: the order in which buckets became ready on
        rank 0, then the remaining buckets. Collective."""
        # See [Note: one order of collectives].
        buckets = list(self.grads)
        number = {b: i for i, b in enumerate(buckets)}
        seen = [number[b] for b in self.completed]
        rest = [number[b] for b in self.order if b not in self.completed]
        order, *_ = self.comm.all_gather_objects(seen + rest, "the order of reductions")
        self._orders[self._key] = [buckets[i] for i in order]

    def _may_wait(self) -> bool:
        """Return whether this rank can wait in a backward for its oldest reduction in flight without a deadlock. A
        waiting rank issues no gathers. So it may wait only if all ranks have issued this reduction, or if backwards
        need no gathers. On a device, where a stream waits, it is enough that all ranks use the same units."""
        oldest = self.issued - len(self._in_flight)
        is_sent = oldest < self.issued_everywhere
        return is_sent or not self._gathers_in_backward or (self.comm.queues and self.one_path)

    def abort(self, deadline: float) -> None:
        """Drop the gradients of a backward that raised. Sends no message. Waits for messages in flight until
        ``deadline`` (in ``time.monotonic``)."""
        for _, pending in (*self._in_flight, *self._second_half):
            pending.abandon(deadline)
        self._in_flight, self._second_half = [], []
        self._flying_nbytes = 0
        for grads in self.grads.values():
            grads.drop()

    # -- issuing and landing --------------------------------------------------------------------------------------

    def _set_ready(self, bucket: Bucket) -> None:
        self._ready.add(bucket)
        if self.grads[bucket].arrived:
            self.completed.append(bucket)

    @outside_autograd
    def _pump(self) -> None:
        while self._next < len(self.order):
            bucket = self.order[self._next]
            if bucket in self._ready:
                self._issue(bucket)
            elif self._expected[bucket] and self.grads[bucket].reduces:
                return
            self._next += 1

    def _issue(self, bucket: Bucket) -> None:
        grads = self.grads[bucket]
        nbytes, total_dtype = bucket.layout.numel * grads.sent_dtype.itemsize, grads.total_dtype
        # Oldest first: landing issues second halves of all-reduces. See [Note: one order of collectives].
        while self._in_flight:
            _, pending = self._in_flight[0]
            crowded = self._flying_nbytes + nbytes > self._max_in_flight_nbytes
            if not (pending.done() or (crowded and self._may_wait())):
                break
            self._land()
        full = grads.buffer_to_reduce()
        self.issued += 1
        whole, factor = not bucket.plan.shards_master, grads.scale_of_sum
        with recording.profiled("reduce", bucket.label):
            reduction = bucket.comm.reduce(full, bucket.label, whole=whole, factor=factor, total_dtype=total_dtype)
        if not self.comm.streams.are_there:
            reduction.used_up = full
        reduction.nbytes = nbytes
        self._in_flight.append((bucket, reduction))
        self._flying_nbytes += nbytes

    def _land(self) -> None:
        bucket, reduction = self._in_flight.pop(0)
        self._flying_nbytes -= reduction.nbytes
        with recording.profiled("wait for", bucket.label):
            is_over = reduction.land()
        if is_over:
            self._add(bucket, reduction)
        else:
            if reduction.used_up is not None and reduction.used_up.dtype != bucket.dtypes.reduce:
                # The sum is in another buffer. Second halves are awaited only at the end, so return this buffer now.
                self.spare.give_back(reduction.used_up)
                reduction.used_up = None
            self._second_half.append((bucket, reduction))

    def _add(self, bucket: Bucket, reduction: Reduction) -> None:
        reduced, full = reduction.finish(), reduction.used_up
        if full is not None and reduced.untyped_storage()._cdata != full.untyped_storage()._cdata:
            self.spare.give_back(full)
        with torch.no_grad():
            bucket.grad_store.add(reduced)


def _put(view: Tensor, grad: Tensor, scale: float) -> None:
    """Write ``grad * scale`` into ``view``. The product is as exact as in the wider of the two dtypes."""
    exact = math.frexp(scale)[0] == 0.5 and grad.dtype is torch.bfloat16
    if scale == 1.0:
        view.copy_(grad)
    elif grad.dtype == view.dtype or grad.itemsize > view.itemsize or exact:
        torch.mul(grad, scale, out=view)
    else:
        view.copy_(grad).mul_(scale)  # in the gradient's narrower dtype the product would be inexact
