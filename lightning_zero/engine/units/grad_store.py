"""Stores of a bucket's reduced gradient, from a backward until it is cleared: on the device, or in host memory.

::

               add: the first of a step             add: further ones         scale_later (clipping)
    OnDevice   kept                                 added                     the caller does it at once
    OnHost     looked at, and copied to its place   brought in pieces, and    by the step, piece by piece, or
               while the host goes on               added by a thread         when somebody looks

Gradients are [owned numel] in grad_dtype. A store belongs to the main thread, but for what a step has claimed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero.comm.profiling import profiled
from lightning_zero.comm.streams import HELD, Streams
from lightning_zero.device import recording
from lightning_zero.device.host_threads import set_own_threads
from lightning_zero.engine.units.home import Tiers
from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.memory import PAIR_NBYTES
from lightning_zero.tiers.extents import Wanted
from lightning_zero.tiers.host import HostTier
from lightning_zero.tiers.pinned import PinnedPair


class Factor(NamedTuple):
    """What gradients are to be multiplied by, on its way to the host."""

    value: Tensor  # 0-d, on the host
    event: Any


class Arrived(NamedTuple):
    """A gradient, and what it is to be multiplied by; None: nothing."""

    grad: Tensor | None
    factor: Tensor | None


class Claimed(NamedTuple):
    """The gradient of a bucket as a step has found it. The step's thread asks for it, and changes nothing."""

    streams: Streams
    grad: Tensor | None
    arrival: Any
    factor: Factor | None

    def arrived(self) -> Arrived:
        """Wait for it."""
        _wait(self.streams, self.arrival)
        if self.factor is None:
            return Arrived(self.grad, None)
        _wait(self.streams, self.factor.event)
        return Arrived(self.grad, self.factor.value)


class GradStore(Protocol):
    """The reduced gradient of a bucket."""

    @property
    def is_there(self) -> bool:
        """Whether there is a gradient, arrived or on its way."""

    @property
    def value(self) -> Tensor | None:
        """The gradient. The host waits for one that is on its way to host memory."""

    @property
    def memory(self) -> Tensor | None:
        """The memory that is taken for it now."""

    def add(self, reduced: Tensor) -> None:
        """Add what was reduced, in any dtype, on the device."""

    def clear(self) -> None:
        """There is no gradient any more."""

    def free(self) -> None:
        """Give back what it holds on a tier; it is not used any more."""

    def claim(self) -> Claimed:
        """Take it as it is now, for an offloaded step: it may be cleared before the step begins."""

    def norm(self, norm_type: float) -> Tensor | None:
        """Its norm, found on its way: 0-d, on the device. None: look at ``value``."""

    def all_finite(self) -> Tensor | None:
        """Whether all of it is finite, found on its way: 0-d bool. None: look at ``value``."""

    def scale_later(self, factor: Callable[[], Factor]) -> bool:
        """Have all of it, if it is there, multiplied before it is used. False: the caller has to multiply ``value``."""


class OnDevice:
    """On the device, as long as there is one."""

    def __init__(self, dtype: torch.dtype, streams: Streams) -> None:
        self._dtype, self._streams = dtype, streams
        self.value: Tensor | None = None

    @property
    def is_there(self) -> bool:
        return self.value is not None

    @property
    def memory(self) -> Tensor | None:
        return self.value

    def add(self, reduced: Tensor) -> None:
        if self.value is None:
            # A transport may return a view of what it has received from all ranks. Kept as the gradient, the view would
            # hold the memory of the whole bucket where a shard is wanted.
            own_memory = reduced.untyped_storage().nbytes() == reduced.numel() * reduced.element_size()
            is_it = reduced.dtype == self._dtype and own_memory
            self.value = reduced if is_it else reduced.to(self._dtype, copy=True)
        else:
            self.value.add_(reduced)

    def clear(self) -> None:
        self.value = None

    def free(self) -> None:
        self.clear()

    def claim(self) -> Claimed:
        return Claimed(self._streams, self.value, None, None)

    def norm(self, norm_type: float) -> Tensor | None:
        return None

    def all_finite(self) -> Tensor | None:
        return None

    def scale_later(self, factor: Callable[[], Factor]) -> bool:
        return False


@dataclass(slots=True)
class _Seen:
    """What was found on the way of a gradient that has not been changed since."""

    version: int = -1  # of its memory
    norms: dict[float, Tensor] = field(default_factory=dict)
    all_finite: Tensor | None = None


class OnHost:
    """In a place in host memory that it keeps: pinned for a GPU, and of its size to the byte.

    A first gradient is looked at on the device before it leaves, for what has been asked of gradients before (norms,
    whether all is finite). On the host each of these would be a pass over memory after the backward is over.
    """

    def __init__(self, tier: HostTier, label: str, numel: int, dtype: torch.dtype, landing: Landing) -> None:
        self._landing, self._dtype = landing, dtype
        self._streams = landing.streams
        self._tier, self._extent = tier, tier.reserve([Wanted(f"{label} (gradient)", numel, dtype)])[0]
        self.memory: Tensor = tier.resident(self._extent)
        self.is_there = False
        self._arrival: Any = None  # an event or a future; None: it has arrived
        self._factor: Factor | None = None
        self._seen = _Seen()

    @property
    def value(self) -> Tensor | None:
        if not self.is_there:
            return None
        if self._arrival is not None:
            with recording.stands("transfer", self._extent.label, on_host=True):
                _wait(self._streams, self._arrival)
        self._arrival = None
        if (factor := self._factor) is not None:
            _wait(self._streams, factor.event)
            self._factor = None
            self.memory.mul_(factor.value)
        return self.memory

    def add(self, reduced: Tensor) -> None:
        recording.moved("d2h", self.memory.nbytes)
        if not self.is_there:
            self._bring(reduced)
        elif self._streams.are_there:
            if self._factor is not None:
                _ = self.value  # scaled first
            self._arrival, self._seen = self._landing.add(reduced, self.memory), _Seen()
        elif (value := self.value) is not None:
            with recording.span("d2h", self._extent.label), recording.stands("transfer", self._extent.label):
                value.add_(reduced)  # added before it is rounded, as on the device
        self.is_there = True

    def _bring(self, reduced: Tensor) -> None:
        """Copy a first gradient to its place. The host does not wait."""
        if not self._streams.are_there:
            with recording.span("d2h", self._extent.label), recording.stands("transfer", self._extent.label):
                self.memory.copy_(reduced)
            return
        # On a GPU the cast is a kernel of its own: a copy to the host that casts too would make the host wait.
        source = reduced.to(self._dtype)
        norms, all_finite = self._landing.look(source)
        with self._streams.on("d2h"), recording.span("d2h", self._extent.label):
            self.memory.copy_(source, non_blocking=True)
            self._arrival = self._streams.mark()
        self._seen = _Seen(self.memory._version, norms, all_finite)
        # Read by this stream, and memory of another one's pool, which does not wait for it.
        self._streams.hold((reduced, source), self._arrival)

    def clear(self) -> None:
        # A copy on its way is not waited for: the next is queued behind it. A thread that still adds is.
        if isinstance(self._arrival, Future):
            _wait(self._streams, self._arrival)
        self.is_there, self._arrival, self._factor = False, None, None

    def free(self) -> None:
        self.clear()
        self._tier.free([self._extent])

    def claim(self) -> Claimed:
        return Claimed(self._streams, self.memory if self.is_there else None, self._arrival, self._factor)

    def norm(self, norm_type: float) -> Tensor | None:
        self._landing.asked_norms.add(norm_type)
        return self._unchanged().norms.get(norm_type)

    def all_finite(self) -> Tensor | None:
        self._landing.asked_finite = True
        return self._unchanged().all_finite

    def _unchanged(self) -> _Seen:
        same = self.is_there and self._factor is None and self._seen.version == self.memory._version
        return self._seen if same else _Seen()

    def scale_later(self, factor: Callable[[], Factor]) -> bool:
        if self.is_there:
            if self._factor is not None:
                _ = self.value
            self._factor = factor()
        return True


def _wait(streams: Streams, arrival: Any) -> None:
    """Wait on the host for an event, or for a future and its error."""
    if isinstance(arrival, Future):
        arrival.result()
    elif arrival is not None:
        streams.accelerator.wait_on_host(arrival)


def make_grad_store(
    plan: BucketPlan, label: str, numel: int, dtype: torch.dtype, tiers: Tiers, streams: Streams
) -> GradStore:
    """The store that ``plan`` asks for."""
    if plan.trainable and plan.grads_on_host:
        assert tiers.host is not None and tiers.landing is not None
        assert plan.shards_master, "a norm that is found on the way is of elements that no other rank counts"
        return OnHost(tiers.host, label, numel, dtype, tiers.landing)
    return OnDevice(dtype, streams)


class Landing:
    """Brings the gradients of one engine to the host, and adds those of micro-batches there in a thread.

    ::

        reduce : reduction 1 | reduction 2
        d2h    :              [piece 1][piece 2][piece 3]...      into two pinned buffers by turns
        thread :                       [add 1]  [add 2]  [add 3]

    The buffers are all the host memory that it takes, whatever the sizes of buckets.

    Attributes:
        asked_norms: the types of norm that have been asked of gradients.
        asked_finite: it has been asked whether gradients are finite.
    """

    def __init__(self, streams: Streams, threads: int) -> None:
        """
        Args:
            threads: for torch's kernels, of the thread that adds.
        """
        self.streams = streams
        self.asked_norms: set[float] = set()
        self.asked_finite = False
        self._threads = threads
        self._pair = PinnedPair(streams.accelerator)
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: deque[tuple[Future[None], Tensor]] = deque()

    def look(self, grad: Tensor) -> tuple[dict[float, Tensor], Tensor | None]:
        """Find out what is asked of gradients about this one, on its device: norms, and whether all of it is finite."""
        wide = torch.promote_types(grad.dtype, torch.float32)
        norms = {kind: torch._foreach_norm([grad], kind, dtype=wide)[0] for kind in sorted(self.asked_norms)}
        return norms, torch.isfinite(grad).all() if self.asked_finite else None

    def add(self, reduced: Tensor, target: Tensor) -> Future[None]:
        """Add ``reduced`` [n], on the device, to ``target`` [n] in pinned host memory, to which all earlier copies are
        queued or over. Both are in use until the future is done."""
        # Memory of the device is kept here and not by the thread alone: this thread must have heard of the end before
        # it lets go. Of how much, is bounded: this thread waits.
        while self._under_way and (len(self._under_way) >= HELD or self._under_way[0][0].done()):
            self._under_way.popleft()[0].exception()  # an error is raised to whoever wants the gradient
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "lightning_zero-landing")
        future = self._pool.submit(self._add, reduced, target, self.streams.mark())
        self._under_way.append((future, reduced))
        return future

    def _add(self, reduced: Tensor, target: Tensor, event: Any) -> None:
        set_own_threads(self._threads)  # a setting of each thread, as is the device
        accelerator = self.streams.accelerator
        accelerator.bind_thread()
        length = PAIR_NBYTES // reduced.element_size()
        before: tuple[Any, Tensor, Tensor] | None = None
        with profiled("transfer", "gradient"), torch.inference_mode(False), torch.no_grad():
            for turn, low in enumerate(range(0, reduced.numel(), length)):
                piece = reduced[low : low + length]
                buffer = self._pair.buffer(turn, piece.dtype, piece.numel())
                with self.streams.on("d2h", after=event):
                    buffer.copy_(piece, non_blocking=True)
                    arrived = self.streams.mark()
                # This piece travels while the one before it is added; the next takes that one's buffer.
                self._land(before)
                before = arrived, buffer, target[low : low + length]
            self._land(before)

    def _land(self, piece: tuple[Any, Tensor, Tensor] | None) -> None:
        if piece is not None:
            arrived, buffer, target = piece
            self.streams.accelerator.wait_on_host(arrived)
            target.add_(buffer)  # added before it is rounded, as on the device

    @property
    def nbytes(self) -> int:
        """Host memory that is taken now."""
        return self._pair.nbytes

    def close(self) -> None:
        """End the thread, after what it was given."""
        if self._pool is not None:
            self._pool.shutdown()
            self._under_way.clear()
        self._pair.close()
