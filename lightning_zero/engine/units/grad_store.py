"""Hold a bucket's reduced gradient, on the device or in host memory, from a backward until gradients are cleared.

::

               first add of a step              further adds              scale_later (clipping)
    GradStore  stored                           added                     returns False: the caller scales
    OnHost     norms taken, copied to host      copied in pieces,         scaled in pieces by the step,
               memory without a host wait       added by a thread         or at the next read

Gradients are [owned numel] in grad_dtype. Only the main thread uses a store. The thread of an offloaded step uses the
result of :meth:`GradStore.claim`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.device import recording
from lightning_zero.device.accelerator import Event
from lightning_zero.device.streams import Streams
from lightning_zero.tiers.extents import Wanted
from lightning_zero.tiers.host import HostTier
from lightning_zero.tiers.pinned import Landing

# A factor to multiply gradients by (0-d, on the host), and the event at the end of its copy to the host.
Factor = tuple[Tensor, Event]


class Claimed(NamedTuple):
    """A reduced gradient that an offloaded step reads. Its copy to the host may not have ended: see :meth:`arrived`."""

    streams: Streams
    grad: Tensor | None
    arrival: Event | Future[None]
    factor: Factor | None

    def arrived(self) -> tuple[Tensor | None, Tensor | None]:
        """Wait for copies to the host. Return (gradient or None, factor to multiply the gradient by; None means 1)."""
        _wait(self.streams, self.arrival)
        factor, event = self.factor or (None, None)
        _wait(self.streams, event)
        return self.grad, factor


class GradStore:
    """Holds a bucket's reduced gradient on the device (in the subclass :class:`OnHost`, in host memory). ``value``: the
    gradient, or None; reading ``value`` waits for a copy to the host that is in flight. ``memory``: the tensor that the
    store has allocated, which :class:`OnHost` also keeps while there is no gradient."""

    def __init__(self, dtype: torch.dtype, streams: Streams) -> None:
        self._dtype, self._streams = dtype, streams
        self.value: Tensor | None = None

    @property
    def is_there(self) -> bool:
        """Return whether the store has a gradient, even if its copy to the host has not ended. Does not wait."""
        return self.value is not None

    @property
    def memory(self) -> Tensor | None:
        return self.value

    def add(self, reduced: Tensor) -> None:
        """Store the gradient `reduced` (on the device, in any dtype), or add `reduced` to the stored gradient."""
        if self.value is None:
            # A transport may return a view of its receive buffer, which would keep the whole bucket's memory.
            own_memory = reduced.untyped_storage().nbytes() == reduced.numel() * reduced.element_size()
            is_it = reduced.dtype == self._dtype and own_memory
            self.value = reduced if is_it else reduced.to(self._dtype, copy=True)
        else:
            self.value.add_(reduced)

    def clear(self) -> None:
        self.value = None

    def free(self) -> None:
        """Free the gradient and host memory reserved for gradients. The store cannot be used afterwards."""
        self.clear()

    def claim(self) -> Claimed:
        """Return the current gradient, for an offloaded step to read. Does not wait for a copy to the host."""
        return Claimed(self._streams, self.value, None, None)

    def norm(self, norm_type: float) -> Tensor | None:
        """Return the gradient's norm [0-d, on the device] if it was computed before the copy to the host, else None."""
        return None

    def all_finite(self) -> Tensor | None:
        """Return whether all elements of the gradient are finite [0-d, on the device] if this was computed before the
        gradient was copied to the host, else None."""
        return None

    def scale_later(self, factor: Callable[[], Factor]) -> bool:
        """Defer scaling: return True if the store will multiply the gradient by `factor()` when it is next used. Return
        False, without a call of `factor`, if the caller must multiply the gradient now."""
        return False


@dataclass(slots=True)
class _Seen:
    """Norms of a gradient and whether it is finite, computed on the device before the copy to the host. Valid while the
    version of the host tensor is `version`."""

    version: int = -1  # of the gradient's memory
    norms: dict[float, Tensor] = field(default_factory=dict)
    all_finite: Tensor | None = None


class OnHost(GradStore):
    """Holds the gradient in host memory, pinned for a GPU. Once a caller has requested a norm or a finite check, the
    store computes the same for each later gradient on the device, before the copy, because the host is slower."""

    is_there = False  # type: ignore[assignment]

    def __init__(self, tier: HostTier, label: str, numel: int, dtype: torch.dtype, landing: Landing) -> None:
        self._landing, self._dtype = landing, dtype
        self._streams = landing.streams
        self._tier, self._extent = tier, tier.reserve([Wanted(f"{label} (gradient)", numel, dtype)])[0]
        self._arrival: Event | Future[None] = None  # event or future; None: arrived
        self._factor: Factor | None = None
        self._seen = _Seen()

    @property
    def memory(self) -> Tensor:
        return self._tier.resident(self._extent)

    @property
    def value(self) -> Tensor | None:  # type: ignore[override]
        if not self.is_there:
            return None
        if self._arrival is not None:
            with recording.waiting("transfer", self._extent.label, on_host=True):
                _wait(self._streams, self._arrival)
        self._arrival = None
        if self._factor is not None:
            factor, event = self._factor
            _wait(self._streams, event)
            self._factor = None
            self.memory.mul_(factor)
        return self.memory

    def add(self, reduced: Tensor) -> None:
        recording.moved("d2h", self.memory.nbytes)
        if not self.is_there:
            self._bring(reduced)
        elif self._streams.are_there:
            if self._factor is not None:
                _ = self.value  # apply the factor first
            self._arrival, self._seen = self._landing.add(reduced, self.memory), _Seen()
        elif (value := self.value) is not None:
            with recording.span("d2h", self._extent.label), recording.waiting("transfer", self._extent.label):
                value.add_(reduced)  # add before rounding, as on the device
        self.is_there = True

    def _bring(self, reduced: Tensor) -> None:
        """Copy the first gradient of a step to host memory. On a device with streams the host does not wait."""
        if not self._streams.are_there:
            with recording.span("d2h", self._extent.label), recording.waiting("transfer", self._extent.label):
                self.memory.copy_(reduced)
            return
        # Cast on the GPU first: a copy to the host that also casts would block the host.
        source = reduced.to(self._dtype)
        norms, all_finite = self._landing.compute_asked(source)
        with self._streams.on("d2h"), recording.span("d2h", self._extent.label):
            self.memory.copy_(source, non_blocking=True)
            self._arrival = self._streams.mark()
        self._seen = _Seen(self.memory._version, norms, all_finite)
        # Keep both until the copy ends: their memory is of another stream's pool, which would reuse it without a wait.
        self._streams.hold((reduced, source), self._arrival)

    def clear(self) -> None:
        # The next copy queues behind a copy under way, but a thread that still adds must be waited for.
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


def _wait(streams: Streams, arrival: Event | Future[None]) -> None:
    """Block the host until `arrival`, an event or a future (None: do not wait). Raise the error of a failed future."""
    if isinstance(arrival, Future):
        arrival.result()
    elif arrival is not None:
        streams.accelerator.wait_on_host(arrival)
