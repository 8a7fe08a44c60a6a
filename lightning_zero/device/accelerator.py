"""What is asked of a device. The base class is the host: it has no streams, and whatever it is asked is done at once.

A stream and an event are whatever the accelerator gives; callers only hand them back. On the host both are None.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor


class Accelerator:
    """The host.

    Attributes:
        device: where tensors of the model are.
        has_streams: work is queued on streams and runs later; memory of the host is another memory.
    """

    has_streams: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """What the driver calls the device; empty for the host."""
        return ""

    # -- streams and events ----------------------------------------------------------------------------------------

    def new_stream(self) -> Any:
        """A stream beside the one that computes."""
        return None

    def current_stream(self) -> Any:
        """The stream on which this thread queues its work now."""
        return None

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, this thread queues on ``stream``, and takes memory from its pool."""
        return contextlib.nullcontext()

    def record(self) -> Any:
        """An event behind everything that the current stream has queued."""
        return None

    def wait(self, event: Any) -> None:
        """The current stream goes on after ``event``. The host does not wait."""

    def is_over(self, event: Any) -> bool:
        """Whether ``event`` has come. The host does not wait."""
        return True

    def wait_on_host(self, event: Any) -> None:
        """The host waits for ``event``."""

    def synchronize(self) -> None:
        """The host waits for everything."""

    def moment(self) -> Any:
        """Now, for :meth:`seconds`: on a device an event behind what the current stream has queued, on the host the
        seconds of ``time.perf_counter``."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """From one :meth:`moment` to another. Both are over."""
        return end - begin

    # -- memory ----------------------------------------------------------------------------------------------------

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """New host memory that the device can copy to and from while the host goes on: pinned where there is a GPU."""
        return torch.empty(shape, dtype=dtype)

    def pin(self, memory: Tensor) -> None:
        """Make ``memory`` (uint8, on the host) such memory.

        Raises:
            MemoryError: the system does not allow it; with CUDA's number.
        """

    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin`, before the memory goes."""

    def free_nbytes(self) -> int:
        """Free memory of the device; 0 where that is the host's."""
        return 0

    def peak_nbytes(self) -> int:
        """The most that tensors have taken of it since :meth:`reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Count the peak from here on."""

    def release_cached(self) -> None:
        """Give memory that is cached and not used back to the device."""

    # -- threads and random numbers --------------------------------------------------------------------------------

    def bind_thread(self) -> None:
        """Make the device that of this thread: a new thread has the first GPU, and would make a context there."""

    def rng_state(self) -> Tensor | None:
        """The state of the device's random numbers; None where they are the host's."""
        return None

    def seeded_rng_state(self, seed: int) -> Tensor | None:
        """What that would be after ``seed`` (64 bits)."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Undo what has been drawn since :meth:`rng_state`."""
