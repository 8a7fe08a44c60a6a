"""The interface to a device. The base class is the host, which has no streams and does all work at once. Callers get
streams and events only to pass them to other methods; on the host both are None."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor

Event = object  # defined by the device; None on the host


class Accelerator:
    """The interface to a device. This base class is the host. ``has_streams``: whether the device has streams."""

    has_streams: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Return the name of the device's model; empty for the host."""
        return ""

    # -- streams and events ----------------------------------------------------------------------------------------

    def new_stream(self) -> Any:
        """Return a new stream, for work that overlaps work of the compute stream; None on the host."""
        return None

    def current_stream(self) -> Any:
        """Return the stream on which this thread queues work; None on the host."""
        return None

    def on(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """Return a context whose body queues work on ``stream``, and allocates device memory from its pool."""
        return contextlib.nullcontext()

    def record(self) -> Event:
        """Return an event that happens when all work queued on the current stream so far ends; None on the host."""
        return None

    def wait(self, event: Event) -> None:
        """Make the current stream, not the host, wait for ``event``."""

    def is_over(self, event: Event) -> bool:
        """Return whether ``event`` has happened. Does not wait."""
        return True

    def wait_on_host(self, event: Event) -> None:
        """Make the host wait for ``event``."""

    def synchronize(self) -> None:
        """Make the host wait for all work of the device."""

    def moment(self) -> Any:
        """Return a moment for :meth:`seconds`: an event after all queued work; on the host, a time of its clock."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two results of :meth:`moment`. Work queued before them must have ended."""
        return end - begin

    # -- memory ----------------------------------------------------------------------------------------------------

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate host memory for asynchronous copies to and from the device; pinned if there is a GPU."""
        return torch.empty(shape, dtype=dtype)

    def pin(self, memory: Tensor) -> None:
        """Pin ``memory`` (uint8, on the host). Raises MemoryError, with CUDA's error code, if the system refuses."""

    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin` of ``memory``. Call this before the memory is freed."""

    def free_nbytes(self) -> int:
        """Return the free memory of the device in bytes; 0 on the host."""
        return 0

    def peak_nbytes(self) -> int:
        """Return the most bytes that tensors on the device have taken since :meth:`reset_peak`; 0 on the host."""
        return 0

    def reset_peak(self) -> None:
        """Make :meth:`peak_nbytes` count from this call on."""

    def release_cached(self) -> None:
        """Free the device memory that torch caches and no tensor uses."""

    # -- threads and random numbers --------------------------------------------------------------------------------

    def bind_thread(self) -> None:
        """Select this device in the current thread. Otherwise a new thread would use the first GPU and its context."""

    def rng_state(self) -> Tensor | None:
        """Return the state of the device's random number generator; None on the host."""
        return None

    def seeded_rng_state(self, seed: int) -> Tensor | None:
        """Return the state that the device's generator has after seeding with ``seed`` (64 bits); None on the host."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Set the device's random number generator to ``state``, a result of :meth:`rng_state`."""
