"""Takes gradients from autograd and reduces buckets over the ranks into shards, in a fixed order.

::

    hook(p)      p.grad goes into the bucket's local buffer: bucket_grads.py
    bucket full  -> ready -> (all buckets before it in the order are issued) -> reduce_scatter / all_reduce
    finish       adds the sum to the bucket's GradStore, drops the local buffer

A rank without gradients for a bucket reduces zeros, because other ranks may have gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.reduction import Reduction, SpareBuffers
from lightning_zero.device import recording
from lightning_zero.engine.passes.bucket_grads import BucketGrads
from lightning_zero.engine.torch_modes import outside_autograd, without_history
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.planning.activations import KEPT_BUFFERS, KEPT_BUFFERS_NBYTES


class IssuedReductions:
    """Counts the reductions issued in a pass: this rank has issued ``here``, and each rank at least ``everywhere``.
    ``one_path``: whether all ranks used the same units when this pass's plan was made, and seem to still."""

    def __init__(self) -> None:
        self.pass_begins(one_path=False)

    def pass_begins(self, *, one_path: bool) -> None:
        self.here = self.everywhere = 0
        self.one_path = one_path


class Reducer:
    """Issues reductions in one order on all ranks and adds their results to the gradient stores."""

    def __init__(
        self, buckets: Iterable[Bucket], comm: Communicator, issued: IssuedReductions, max_in_flight_nbytes: int
    ) -> None:
        """``max_in_flight_nbytes``: bound on the buffers of unfinished reductions. Exceeded where a wait could hang."""
        self.comm = comm
        self._issued = issued
        buckets = list(buckets)
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
        self.completed: list[Bucket] = []  # in the order of becoming ready in this backward
        self._key = ""
        self._late: set[Bucket] = set()
        self.plans_changed()
        self._next = 0
        self._expected: dict[Bucket, int] = {}  # number of parameters that require a gradient
        self._ready: set[Bucket] = set()
        self._lagging_here: set[Bucket] = set()
        self._in_flight: list[tuple[Bucket, Reduction]] = []
        self._second_half: list[tuple[Bucket, Reduction]] = []
        self._flying_nbytes = 0
        self._max_in_flight_nbytes = max_in_flight_nbytes

    def plans_changed(self) -> None:
        """Forget the learned orders of reductions, after buckets got new placements. Existing gradients stay."""
        self._gathers_in_backward = any(bucket.plan.reshards for bucket in self.grads)
        self.order: list[Bucket] = list(reversed(list(self.grads)))
        self._orders: dict[str, list[Bucket]] = {}  # learned, by kind of pass
        self._lagging: dict[str, set[Bucket]] = {}  # completed by some rank only at its end

    def begin(self, key: str) -> None:
        """Reset for a backward of kind ``key``."""
        self.unreduced |= not self.synchronize
        self._key = key
        self.order = self._orders.get(key, self.order)
        for bucket, grads in self.grads.items():
            self._expected[bucket] = sum([info.param.requires_grad for info in bucket.params])
            grads.begin(reduces=self.synchronize or not bucket.plan.accumulates_locally, fresh=not self.unreduced)
        self._late, self._lagging_here = set(), set()
        self._waiting |= {b for b, grads in self.grads.items() if self._expected[b] and not grads.reduces}
        # If all parameters of a waiting bucket are frozen by now, this backward brings nothing more for the bucket.
        self._ready = {b for b in self._waiting if self.synchronize and not self._expected[b]}
        self.completed = []
        self._next = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        previous, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = previous

    def set_loss_scale(self, scale: float) -> None:
        """Divide the gradients of the next backwards by ``scale``, by which the user multiplies the loss."""
        self.loss_scale, self._unscaled = scale, set()
        for bucket, grads in self.grads.items():
            grads.set_scale(1.0 / (bucket.comm.ranks.grad_divisor * scale))

    def unscale(self, params: Iterable[nn.Parameter]) -> None:
        """Show the gradients of ``params`` without the loss scale, until :meth:`set_loss_scale`."""
        self._unscaled |= {id(param) for param in params}

    def shown_scale(self, param_id: int) -> float:
        """Return the loss scale that ``param.grad`` shows, as under DDP; 1 after :meth:`unscale`. Stores lack it."""
        return 1.0 if param_id in self._unscaled else self.loss_scale

    def local_scale(self, bucket: Bucket) -> float:
        """Return the factor that turns a bucket's local buffer into this rank's gradients before loss scaling."""
        grads = self.grads[bucket]
        return 1.0 / grads.scale_on_arrival / self.loss_scale

    @without_history
    def accept_grad(self, bucket: Bucket, slot: int, grad: Tensor) -> None:
        """Store ``grad``, which autograd has computed for the parameter at ``slot``, and issue reductions now ready."""
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
        """Reduce late gradients and await all reductions. Returns the maxima over ranks of ``told``, bytes that travel
        with this message; none if no message was sent. Collective."""
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
        # Last: buckets that some rank completes only at its end. They would hold up the others.
        self._orders[self._key].sort(key=self._lagging[self._key].__contains__)
        self.unreduced &= not self.synchronize
        if self.synchronize:
            self._waiting.clear()
        return maxima

    def refuse_unreduced(self, places: Iterable[Place]) -> None:
        """Raise RuntimeError if gradients at any rank's ``places`` are not fully reduced. Collective."""
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
        """Raise RuntimeError if a gradient at ``places`` (None: any) lacks part of a backward that has raised."""
        partial = [bucket for bucket, grads in self.grads.items() if grads.partial]
        if partial and places is not None:
            partial = [b for b, info in places if info.slot in self.grads[b].partial]
        if partial:
            raise RuntimeError(
                "a backward has raised before its end, and the gradients that were there before it, or came in it, are "
                "not whole. Clear them (optimizer.zero_grad()), and run all backwards of the step again."
            )

    def _agree(self, reduced: Sequence[Bucket], told: Sequence[int]) -> tuple[list[Bucket], Sequence[int]]:
        """Agree which slots of buckets ``reduced`` have gradients. Return the buckets to reduce again (for late
        gradients), and the maxima of ``told``. Collective."""
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
        """Adopt the order in which buckets became ready on rank 0, the remaining buckets last. Collective."""
        # See [Note: one order of collectives].
        buckets = list(self.grads)
        number = {b: i for i, b in enumerate(buckets)}
        seen = [number[b] for b in self.completed]
        rest = [number[b] for b in self.order if b not in self.completed]
        order, *_ = self.comm.all_gather_objects(seen + rest, "the order of reductions")
        self._orders[self._key] = [buckets[i] for i in order]

    def _may_wait(self) -> bool:
        """Return whether this rank can safely wait in a backward for its oldest reduction in flight. A waiting rank
        issues no gathers. So it waits only if all ranks have issued that reduction, or need no gather before they issue
        it. Otherwise ranks could wait for each other for ever. On a device a stream waits, not the host, so there it is
        enough that all ranks use the same units."""
        oldest = self._issued.here - len(self._in_flight)
        is_sent = oldest < self._issued.everywhere
        return is_sent or not self._gathers_in_backward or (self.comm.queues and self._issued.one_path)

    def abort(self, deadline: float) -> None:
        """Drop the gradients of a backward that raised. Sends nothing; awaits messages in flight until ``deadline``."""
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
        self._issued.here += 1
        operation = bucket.comm.reduce_scatter if bucket.plan.shards_master else bucket.comm.all_reduce
        with recording.profiled("reduce", bucket.label):
            reduction = operation(full, bucket.label, factor=grads.scale_of_sum, total_dtype=total_dtype)
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
