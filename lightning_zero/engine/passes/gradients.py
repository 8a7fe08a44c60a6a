"""Takes gradients from autograd and reduces buckets over the ranks into shards, in a fixed order.

::

    hook(p)      p.grad goes into the bucket's local buffer: bucket_grads.py
    bucket full  -> ready -> (all buckets before it in the order are issued) -> reduce_scatter / all_reduce
    finish       adds the sum to the bucket's GradStore, drops the local buffer

A rank without gradients for a bucket reduces zeros, because other ranks may have gradients.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.profiling import profiled
from lightning_zero.comm.reduction import Reduction, SpareBuffers
from lightning_zero.engine.passes.bucket_grads import BucketGrads
from lightning_zero.engine.torch_modes import outside_autograd, without_history
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.planning.activations import KEPT_BUFFERS, KEPT_BUFFERS_NBYTES


class IssuedReductions:
    """Counts the reductions issued in the open pass.

    Attributes:
        here: number of reductions that this rank has issued.
        everywhere: number that every rank has issued, as far as the ranks have told each other.
        one_path: all ranks follow a plan that was recorded while all ranks took the same path.
    """

    def __init__(self) -> None:
        self.pass_begins(one_path=False)

    def pass_begins(self, *, one_path: bool) -> None:
        self.here = self.everywhere = 0
        self.one_path = one_path


PATIENCE_S = 2.0  # longest wait for a reduction in flight, inside a backward
_POLL_S = 0.0002


class Reducer:
    """Issues reductions in one order on all ranks and adds their results to the gradient stores."""

    def __init__(
        self,
        buckets: Iterable[Bucket],
        comm: Communicator,
        issued: IssuedReductions,
        max_in_flight_nbytes: int,
    ) -> None:
        """``max_in_flight_nbytes``: bound on buffers of unfinished reductions, kept where a wait is safe."""
        self.comm = comm
        self._issued = issued
        buckets = list(buckets)
        nbytes = max((b.layout.numel * b.dtypes.reduce.itemsize for b in buckets), default=0)
        self.spare = SpareBuffers(min(KEPT_BUFFERS * nbytes, KEPT_BUFFERS_NBYTES))
        # On a device one kernel per bucket. On the host a gradient that is copied at once is still in the cache.
        self.grads: dict[Bucket, BucketGrads] = {
            b: BucketGrads(b, 1.0 / comm.world_size, self.spare, batched_copy=comm.streams.are_there) for b in buckets
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
        self._ready: set[Bucket] = set()
        self._lagging_here: set[Bucket] = set()
        self._in_flight: list[tuple[Bucket, Reduction]] = []
        self._second_half: list[tuple[Bucket, Reduction]] = []
        self._flying_nbytes = 0
        self._max_in_flight_nbytes = max_in_flight_nbytes

    def plans_changed(self) -> None:
        """Forget learned orders after buckets got new plans. Existing gradients stay."""
        self._gathers_in_backward = any(bucket.reshards for bucket in self.grads)
        self.order: list[Bucket] = list(reversed(list(self.grads)))
        self._orders: dict[str, list[Bucket]] = {}  # learned, by kind of pass
        self._lagging: dict[str, set[Bucket]] = {}  # completed by some rank only at its end

    def begin(self, key: str, expected: Callable[[Bucket], int]) -> None:
        """Reset for a backward of kind ``key``. ``expected``: how many of a bucket's parameters require a gradient."""
        self.unreduced |= not self.synchronize
        self._key = key
        self.order = self._orders.get(key, self.order)
        self._expected = {b: expected(b) for b in self.grads}
        self._late, self._lagging_here = set(), set()
        if not self.synchronize:
            self._waiting |= {b for b in self.grads if self._expected[b] and not self._synchronizes(b)}
        # If all parameters of a waiting bucket are frozen by now, this backward brings nothing more for the bucket.
        self._ready = {b for b in self._waiting if self.synchronize and not self._expected[b]}
        self.completed = []
        self._next = 0
        for grads in self.grads.values():
            grads.begin(fresh=not self.unreduced)

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
        for grads in self.grads.values():
            grads.set_scale(1.0 / (self.comm.world_size * scale))

    def unscale(self, params: Iterable[nn.Parameter]) -> None:
        """Show the gradients of ``params`` without the loss scale, until :meth:`set_loss_scale`."""
        self._unscaled |= {id(param) for param in params}

    def shown_scale(self, param_id: int) -> float:
        """Return the loss scale that a gradient shows to users, as under DDP. Stored gradients have none."""
        return 1.0 if param_id in self._unscaled else self.loss_scale

    def local_scale(self, bucket: Bucket) -> float:
        """Return the factor that turns a bucket's local buffer into this rank's gradients without loss scale."""
        grads = self.grads[bucket]
        return grads.factor / grads.scale / self.loss_scale

    @without_history
    def take(self, bucket: Bucket, slot: int, grad: Tensor) -> None:
        """Store a gradient that has arrived, and issue the reductions that are ready."""
        grads = self.grads[bucket]
        late = grads.take(slot, grad)
        if not self._synchronizes(bucket):
            if len(grads.arrived) == self._expected[bucket]:
                grads.copy_in()
            return
        if late:
            # A second gradient (a module used twice under checkpointing). All ranks agree on these at the end.
            self._late.add(bucket)
        if not grads.issued and len(grads.arrived) == self._expected[bucket] and bucket not in self._ready:
            self._set_ready(bucket)
            self._pump()

    @property
    def flying_nbytes(self) -> int:
        """Count the bytes in buffers of unfinished reductions, including second halves of all-reduces."""
        second = (b.layout.numel * b.dtypes.reduce.itemsize for b, _ in self._second_half)
        return self._flying_nbytes + sum(second)

    @property
    def has_arrivals(self) -> bool:
        return any(grads.arrived for grads in self.grads.values())

    def flush(self) -> None:
        """Issue all remaining reductions in order, at the end of a backward. Collective."""
        for bucket in self.order:
            if not self._synchronizes(bucket):
                self.grads[bucket].copy_in()
            elif self._expected[bucket] and bucket not in self._ready:
                self._set_ready(bucket)
                self._lagging_here.add(bucket)
        self._pump()

    def end(self, flag: bool = False) -> bool:
        """Reduce late gradients and await all reductions. Returns whether any rank has set ``flag``. Collective."""
        reduced = [b for b in self.grads if self._synchronizes(b)]
        if not reduced:
            return False
        late, flagged = self._agree(reduced, flag)
        for bucket in late:
            self._issue(bucket)
        while self._in_flight:
            self._land()
        self._land_second_halves()
        if self._key not in self._orders:
            self._learn_order()
        self._put_lagging_last()
        self.unreduced &= not self.synchronize
        if self.synchronize:
            self._waiting.clear()
        return flagged

    def refuse_unreduced(self, places: Iterable[Place]) -> None:
        """Raise RuntimeError if gradients at ``places`` (may differ by rank) are not fully reduced. Collective."""
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
        if places is None:
            partial = any(grads.partial for grads in self.grads.values())
        else:
            partial = any(place.info.slot in self.grads[place.bucket].partial for place in places)
        if partial:
            raise RuntimeError(
                "a backward has raised before its end, and the gradients that were there before it, or came in it, are "
                "not whole. Clear them (optimizer.zero_grad()), and run all backwards of the step again."
            )

    def _agree(self, reduced: Sequence[Bucket], flag: bool) -> tuple[list[Bucket], bool]:
        """Agree on used parameters, buckets to reduce again (returned, in order) and ``flag``. Collective."""
        # All ranks' vectors need one length and order, so they cover all slots of all synchronized buckets.
        lagging = self._lagging.setdefault(self._key, set())
        flags: list[bool] = [flag]
        for bucket in reduced:
            flags += [bucket in self._late, bucket in self._lagging_here]
            flags += [slot in self.grads[bucket].used for slot in range(len(bucket.params))]
        agreed = iter(self.comm.max_(torch.tensor(flags, dtype=torch.uint8)).tolist())
        late = []
        flagged = bool(next(agreed))
        for bucket in reduced:
            if next(agreed):
                late.append(bucket)
            if next(agreed):
                lagging.add(bucket)
            grads = self.grads[bucket]
            grads.agreed = {slot for slot in range(len(bucket.params)) if next(agreed)}
            grads.used |= grads.agreed
        return sorted(late, key=self.order.index), flagged

    def _learn_order(self) -> None:
        """Adopt rank 0's order in which buckets became ready. The remaining buckets come last. Collective."""
        # Each rank has seen its own order, and all must issue reductions in one order.
        buckets = list(self.grads)
        number = {b: i for i, b in enumerate(buckets)}
        seen = [number[b] for b in self.completed]
        rest = [number[b] for b in self.order if b not in self.completed]
        order = torch.tensor(seen + rest, dtype=torch.int64)
        self.comm.broadcast_small(order)
        self._orders[self._key] = [buckets[i] for i in order.tolist()]

    def _put_lagging_last(self) -> None:
        """Move buckets that some rank completes only at its end last, because they would hold up the others."""
        lagging = self._lagging[self._key]
        self._orders[self._key].sort(key=lambda bucket: bucket in lagging)

    def _may_wait_for(self, pending: Reduction) -> bool:
        """Return whether this rank may wait in a backward for ``pending``, its oldest reduction in flight.

        A waiting rank issues no gathers. So it waits only if all ranks have issued that reduction or need no gather
        before it; otherwise ranks could wait for each other for ever.
        """
        oldest = self._issued.here - len(self._in_flight)
        if oldest < self._issued.everywhere or not self._gathers_in_backward:
            return True
        return self._issued.one_path and self._comes(pending)

    def _comes(self, pending: Reduction) -> bool:
        """Wait up to ``PATIENCE_S`` for a reduction. Returns whether it arrived; true on a device, whose stream waits.

        A rank that skips a parameter issues its reduction only at the end of the backward. Then this rank exceeds the
        memory bound once; from the next backward on that bucket comes last.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not self.comm.queues and not pending.done():
            if time.monotonic() > deadline:
                self._issued.one_path = False
                return False
            time.sleep(_POLL_S)
        return True

    def abort(self, deadline: float) -> None:
        """Drop the gradients of a backward that raised. Sends nothing; awaits messages in flight until ``deadline``."""
        for _, pending in (*self._in_flight, *self._second_half):
            pending.abandon(deadline)
        self._in_flight, self._second_half = [], []
        self._flying_nbytes = 0
        for grads in self.grads.values():
            grads.drop()

    # -- issuing and landing --------------------------------------------------------------------------------------

    def _synchronizes(self, bucket: Bucket) -> bool:
        return self.synchronize or not self.grads[bucket].accumulates

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
            elif self._expected[bucket] and self._synchronizes(bucket):
                return
            self._next += 1

    def _issue(self, bucket: Bucket) -> None:
        grads = self.grads[bucket]
        nbytes, total_dtype = bucket.layout.numel * grads.sent_dtype.itemsize, grads.total_dtype
        # Oldest first: landing issues second halves of all-reduces, which need one order on all ranks.
        while self._in_flight:
            _, pending = self._in_flight[0]
            crowded = self._flying_nbytes + nbytes > self._max_in_flight_nbytes
            if not (pending.done() or (crowded and self._may_wait_for(pending))):
                break
            self._land()
        full = grads.complete()
        grads.issued = True
        self._issued.here += 1
        operation = self.comm.reduce_scatter if bucket.plan.shards_master else self.comm.all_reduce
        with profiled("reduce", bucket.label):
            reduction = operation(full, bucket.label, factor=grads.factor, total_dtype=total_dtype)
        if not self.comm.streams.are_there:
            reduction.used_up = full
        reduction.nbytes = nbytes
        self._in_flight.append((bucket, reduction))
        self._flying_nbytes += nbytes

    def _land(self) -> None:
        bucket, reduction = self._in_flight.pop(0)
        self._flying_nbytes -= reduction.nbytes
        with profiled("wait for", bucket.label):
            is_over = reduction.land()
        if is_over:
            self._add(bucket, reduction)
        else:
            if reduction.used_up is not None and reduction.used_up.dtype != bucket.dtypes.reduce:
                # The sum is in another buffer. Second halves are awaited only at the end, so return this buffer now.
                self.spare.give_back(reduction.used_up)
                reduction.used_up = None
            self._second_half.append((bucket, reduction))

    def _land_second_halves(self) -> None:
        """Wait for second halves after all first halves, because earlier waits would delay reductions."""
        for bucket, reduction in self._second_half:
            self._add(bucket, reduction)
        self._second_half = []

    def _add(self, bucket: Bucket, reduction: Reduction) -> None:
        reduced, full = reduction.finish(), reduction.used_up
        if full is not None and reduced.untyped_storage()._cdata != full.untyped_storage()._cdata:
            self.spare.give_back(full)
        low, high = bucket.owned_range
        if self.comm.shard_size == 1 and reduced.numel() != high - low:
            reduced = reduced[low:high]
        with torch.no_grad():
            bucket.grad_store.add(reduced)
