"""Gradients: from autograd into flat buffers, over the ranks in a fixed order, into shards.

::

    hook(p)      copies p.grad, divided by the number of ranks, into the bucket's local buffer and frees it
    bucket full  -> ready -> (all buckets before it in the order are issued) -> reduce_scatter / all_reduce
    finish       adds the sum to bucket.grad, drops the local buffer

A bucket that got no gradient on this rank is reduced with zeros in its place of the order: other ranks may have some.
Where gradients rest replicated (stages 0 and 1) the local buffer itself accumulates until a backward synchronizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.unit import Bucket, ParamInfo
from lightning_zero.memory.collectives import Communicator, Pending
from lightning_zero.planning.placement import Placement

_ZEROING = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}


class GradSentinel(Tensor):
    """Stands for the gradient of a sharded parameter in ``param.grad`` between backward and step.

    It has the shape of the gradient and no values. Zeroing it is noticed by the engine; any other use raises.
    """

    fqn: str
    zeroed: bool  # by the user, since the last backward
    added: bool  # autograd added a new gradient to it before the engine took notice of the backward
    incoming: Tensor | None  # that gradient

    @staticmethod
    def __new__(cls, info: ParamInfo) -> GradSentinel:
        param = info.param
        wrapper: GradSentinel = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, info.shape, dtype=param.dtype, device=param.device, requires_grad=False
        )
        wrapper.fqn = info.fqn
        wrapper.zeroed = wrapper.added = False
        wrapper.incoming = None
        return wrapper

    def take(self) -> Tensor | None:
        """The gradient that autograd added."""
        incoming, self.incoming = self.incoming, None
        return incoming

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<the gradient of {self.fqn} is sharded; lightning_zero.grad_norm and lightning_zero.gather read it>"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ZEROING:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for tensor in tensors:
                tensor.zeroed = True
            return args[0] if func is torch.ops.aten.zero_.default else None
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], GradSentinel):
            args[0].added = True  # autograd accumulates: what has been reduced stays where it is
            args[0].incoming = args[1]
            return args[0]
        flat = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
        name = next((a.fqn for a in flat if isinstance(a, GradSentinel)), "a parameter")
        raise RuntimeError(
            f"the gradient of {name} is sharded over the ranks and cannot be read from .grad ({func}). Use "
            "lightning_zero.grad_norm(module) for norms, lightning_zero.clip_grad_norm_(module, max_norm) or "
            "Trainer(gradient_clip_val=) for clipping, lightning_zero.gather(module, grads=True) for values."
        )


@dataclass(slots=True, eq=False)
class BucketGrads:
    """What one bucket has received and not yet reduced."""

    bucket: Bucket
    scale: float  # 1 / number of ranks: averages, as DDP does, before anything is added up
    local: Tensor | None = None  # [numel] unreduced gradient: reduce_dtype, or grad_dtype where it accumulates
    written: set[int] = field(default_factory=set)  # slots of ``local`` that hold a gradient
    arrived: int = 0  # gradients of this backward
    issued: bool = False  # reduced in this backward
    used: set[int] = field(default_factory=set)  # slots with a gradient since they were last zeroed, on this rank

    @property
    def accumulates(self) -> bool:
        return self.bucket.row.grad is Placement.replicated

    def take(self, slot: int, grad: Tensor) -> None:
        """Move one parameter's gradient into the local buffer."""
        bucket = self.bucket
        if self.local is None:
            dtype = bucket.dtypes.grad if self.accumulates else bucket.dtypes.reduce
            self.local = torch.empty(bucket.layout.numel, dtype=dtype, device=grad.device)
        place = bucket.layout.slots[slot]
        view = self.local[place.start : place.start + place.numel].view(bucket.params[slot].shape)
        if slot in self.written:
            view.add_(grad, alpha=self.scale)
        elif self.scale == 1.0:
            view.copy_(grad)
        elif grad.dtype == view.dtype or math.frexp(self.scale)[0] == 0.5:
            torch.mul(grad, self.scale, out=view)
        else:
            view.copy_(grad).mul_(self.scale)  # a product rounded to the gradient's lower dtype would be inexact
        self.written.add(slot)
        self.used.add(slot)
        self.arrived += 1

    def complete(self) -> Tensor:
        """The local buffer with zeros wherever no gradient came, to be reduced; this object lets go of it."""
        bucket = self.bucket
        full = self.local
        if full is None:
            full = torch.zeros(bucket.layout.numel, dtype=bucket.dtypes.reduce, device=bucket.comm.device)
        else:
            for low, high in bucket.layout.gaps():
                full[low:high].zero_()
            for place in bucket.layout.slots:
                if place.index not in self.written:
                    full[place.start : place.start + place.numel].zero_()
        self.local = None
        self.written = set()
        return full if full.dtype == bucket.dtypes.reduce else full.to(bucket.dtypes.reduce)

    def add_reduced(self, reduced: Tensor) -> None:
        """Add a reduced gradient [owned numel] to ``bucket.grad``."""
        bucket = self.bucket
        if bucket.grad is None:
            own_memory = reduced.untyped_storage().nbytes() == reduced.numel() * reduced.element_size()
            same = reduced.dtype == bucket.dtypes.grad
            bucket.grad = reduced if same and own_memory else reduced.to(bucket.dtypes.grad, copy=True)
        else:
            bucket.grad.add_(reduced)

    def forget(self, slots: Iterable[int]) -> None:
        """The user zeroed these parameters' gradients."""
        gone = set(slots) & (self.used | self.written)
        if not gone:
            return
        bucket = self.bucket
        self.used -= gone
        self.written -= gone
        if not self.written:
            self.local = None
        if bucket.grad is None:
            return
        if self.used:
            self._zero_reduced(gone)
        else:
            bucket.grad = None

    def zero(self, slots: Iterable[int]) -> None:
        """The user zeroed these parameters' gradients and kept them: zero is a gradient, unlike none."""
        zeroed = set(slots) & (self.used | self.written)
        self.written -= zeroed
        self._zero_reduced(zeroed)

    def _zero_reduced(self, slots: set[int]) -> None:
        bucket = self.bucket
        if bucket.grad is not None and slots:
            for fragment in bucket.owned_fragments():
                if fragment.index in slots:
                    bucket.grad[fragment.start : fragment.start + fragment.numel].zero_()


class Reducer:
    """Issues reductions in one order on all ranks and lands their results.

    Attributes:
        order: buckets in the order of their reductions.
        synchronize: off inside ``no_sync``: gradients that rest replicated are not reduced.
    """

    def __init__(self, buckets: Iterable[Bucket], comm: Communicator, max_in_flight_nbytes: int) -> None:
        self.comm = comm
        self.grads: dict[Bucket, BucketGrads] = {b: BucketGrads(b, 1.0 / comm.world_size) for b in buckets}
        self.order: list[Bucket] = list(reversed(list(self.grads)))
        self.synchronize = True
        self.completed: list[Bucket] = []  # in the order in which they got ready in this backward
        self._late: set[Bucket] = set()
        self._next = 0
        self._ready: set[Bucket] = set()
        self._in_flight: list[tuple[Bucket, Pending]] = []
        self._second_half: list[tuple[Bucket, Pending]] = []
        self._flying_nbytes = 0
        self._max_in_flight_nbytes = max_in_flight_nbytes

    def begin(self, expected: Callable[[Bucket], int]) -> None:
        """A backward starts. ``expected`` tells how many of a bucket's parameters require a gradient now."""
        self._expected = {b: expected(b) for b in self.grads}
        self._ready, self._late = set(), set()
        self.completed = []
        self._next = 0
        for grads in self.grads.values():
            grads.arrived, grads.issued = 0, False

    def take(self, bucket: Bucket, slot: int, grad: Tensor) -> None:
        """A gradient arrived. Issues what has become ready."""
        grads = self.grads[bucket]
        with torch.no_grad():
            grads.take(slot, grad)
        if not self._synchronizes(bucket):
            return
        if grads.issued:
            self._late.add(bucket)  # a second arrival (a module reused under checkpointing): reduced again at the end
        elif grads.arrived == self._expected[bucket]:
            self._set_ready(bucket)
            self._pump()

    def late_buckets(self) -> list[int]:
        """Places (in ``order``) of buckets that must be reduced a second time."""
        return sorted(self.order.index(b) for b in self._late)

    def end(self, late: Sequence[int] | None = None) -> None:
        """The backward is over: issue everything that is left, in order, and wait for all of it.

        Args:
            late: places of the buckets that any rank must reduce again; default: this rank's own.
        """
        again = self.late_buckets() if late is None else list(late)
        for bucket in self.order:
            if self._synchronizes(bucket) and self._expected[bucket] and bucket not in self._ready:
                self._set_ready(bucket)
        self._pump()
        for place in again:
            self._issue(self.order[place])
        while self._in_flight:
            self._land()
        self._land_second_halves()

    def abort(self) -> None:
        """After an exception: drop this backward's partial gradients. Waits for messages, starts none."""
        for _, pending in (*self._in_flight, *self._second_half):
            pending.wait()
        self._in_flight, self._second_half = [], []
        self._flying_nbytes = 0
        for grads in self.grads.values():
            grads.local, grads.written = None, set()

    # -- issuing and landing --------------------------------------------------------------------------------------

    def _synchronizes(self, bucket: Bucket) -> bool:
        return self.synchronize or not self.grads[bucket].accumulates

    def _set_ready(self, bucket: Bucket) -> None:
        self._ready.add(bucket)
        if self.grads[bucket].arrived:
            self.completed.append(bucket)

    def _pump(self) -> None:
        while self._next < len(self.order):
            bucket = self.order[self._next]
            if bucket in self._ready:
                self._issue(bucket)
            elif self._expected[bucket] and self._synchronizes(bucket):
                return
            self._next += 1

    def _issue(self, bucket: Bucket) -> None:
        nbytes = bucket.layout.numel * bucket.dtypes.reduce.itemsize
        while self._in_flight and (
            self._in_flight[0][1].done() or self._flying_nbytes + nbytes > self._max_in_flight_nbytes
        ):
            self._land()
        grads = self.grads[bucket]
        full = grads.complete()
        grads.issued = True
        operation = self.comm.reduce_scatter if bucket.row.master is Placement.sharded else self.comm.all_reduce
        self._in_flight.append((bucket, operation(full, bucket.label)))
        self._flying_nbytes += nbytes

    def _land(self) -> None:
        bucket, pending = self._in_flight.pop(0)
        self._flying_nbytes -= bucket.layout.numel * bucket.dtypes.reduce.itemsize
        reduced = pending.wait()
        if isinstance(reduced, Pending):
            self._second_half.append((bucket, reduced))
        else:
            self._add(bucket, reduced)

    def _land_second_halves(self) -> None:
        for bucket, pending in self._second_half:
            self._add(bucket, pending.wait())
        self._second_half = []

    def _add(self, bucket: Bucket, reduced: Tensor) -> None:
        low, high = bucket.owned_range
        if self.comm.world_size == 1 and reduced.numel() != high - low:
            reduced = reduced[low:high]
        with torch.no_grad():
            self.grads[bucket].add_reduced(reduced)
