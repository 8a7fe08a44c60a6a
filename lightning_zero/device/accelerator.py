"""The interface to a device. The base class is the host: it has no streams and does everything at once. Callers get
streams and events only to pass them back; on the host both are None."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor

Event = object  # defined by the device; None on the host


class Accelerator:
    """Drives the host; subclasses drive devices. ``has_streams``: the device has streams and its own memory."""

    has_streams: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Return the name of the device's model; empty for the host."""
        return ""

    # -- streams and events ----------------------------------------------------------------------------------------

    def new_stream(self) -> Any:
        """Make a stream for work beside the compute stream."""
        return None

    def current_stream(self) -> Any:
        """Return the stream on which this thread queues work."""
        return None

    def on(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """Queue the body's work on ``stream``, and allocate the body's memory from the pool of ``stream``."""
        return contextlib.nullcontext()

    def record(self) -> Event:
        """Return an event after everything that the current stream has queued."""
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
        """Return a point in time for :meth:`seconds`: an event after all queued work; on the host its clock's time."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two results of :meth:`moment`, whose work must be over."""
        return end - begin

    # -- memory ----------------------------------------------------------------------------------------------------

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate host memory that the device can copy asynchronously; pinned if there is a GPU."""
        return torch.empty(shape, dtype=dtype)

    def pin(self, memory: Tensor) -> None:
        """Pin ``memory`` (uint8, on the host). Raises MemoryError, with CUDA's error code, if the system refuses."""

    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin`, before the memory is freed."""

    def free_nbytes(self) -> int:
        """Return the free bytes of the device; 0 on the host."""
        return 0

    def peak_nbytes(self) -> int:
        """Return the most bytes that tensors have taken since :meth:`reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Restart the count of :meth:`peak_nbytes`."""

    def release_cached(self) -> None:
        """Return cached, unused memory to the device."""

    # -- threads and random numbers --------------------------------------------------------------------------------

    def bind_thread(self) -> None:
        """Select this device in the current thread. A new thread would use the first GPU and make a context on it."""

    def rng_state(self) -> Tensor | None:
        """Return the state of the device's random numbers; None on the host."""
        return None

    def seeded_rng_state(self, seed: int) -> Tensor | None:
        """Return the device's random state after seeding with ``seed`` (64 bits); None on the host. Seeds nothing."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Restore a state of :meth:`rng_state`."""
