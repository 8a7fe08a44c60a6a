"""Copy between a device and unpinned host memory or files, through pinned buffers of a fixed size. They are allocated
at first use and reused, because pinning takes longer than a copy. Without a GPU nothing is pinned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.device.accelerator import Accelerator
from lightning_zero.planning.layout import round_up
from lightning_zero.planning.memory import PAIR_NBYTES, READ_AHEAD
from lightning_zero.tiers.pages import PAGE, HostPages


class _Pinned:
    """Pinned memory of ``total`` bytes that is allocated at first use."""

    def __init__(self, accelerator: Accelerator, total: int) -> None:
        self._accelerator, self._total = accelerator, total
        self._pages: HostPages | None = None

    def _taken(self) -> HostPages:
        if self._pages is None:
            self._pages = HostPages(self._total, self._accelerator)
        return self._pages

    @property
    def nbytes(self) -> int:
        return 0 if self._pages is None else self._pages.nbytes

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None


class PinnedPair(_Pinned):
    """Two pinned buffers of ``PAIR_NBYTES``: one is filled while the other is emptied."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator, 2 * PAIR_NBYTES)

    def buffer(self, turn: int, dtype: torch.dtype, numel: int) -> Tensor:
        """Return a tensor [numel], up to ``PAIR_NBYTES``, for piece number ``turn``: the two buffers take turns."""
        return self._taken().tensor(turn % 2 * PAIR_NBYTES, dtype, numel)


class Sender(PinnedPair):
    """Copies unpinned host memory to the device, with a cast on the host. Only the calling thread waits for that."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._sent: list[Any] = [None, None]  # for each buffer the event at the end of the last copy out of it
        self._lock = threading.Lock()

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy ``source`` [n] to ``target`` [n] on the current stream. Returns when ``source`` has been read."""
        length = PAIR_NBYTES // target.element_size()
        with self._lock:
            for turn, low in enumerate(range(0, source.numel(), length)):
                piece = source[low : low + length]
                if self._sent[turn % 2] is not None:
                    self._accelerator.wait_on_host(self._sent[turn % 2])
                buffer = self.buffer(turn, target.dtype, piece.numel())
                buffer.copy_(piece)
                target[low : low + length].copy_(buffer, non_blocking=True)
                self._sent[turn % 2] = self._accelerator.record()


class ReadAhead(_Pinned):
    """``READ_AHEAD`` pinned buffers of ``nbytes``, into which files are read ahead of their copy to the device."""

    def __init__(self, accelerator: Accelerator, nbytes: int) -> None:
        self._nbytes = round_up(nbytes, PAGE)
        super().__init__(accelerator, READ_AHEAD * self._nbytes)
        self._free: list[tuple[int, Any]] = [(place, None) for place in range(READ_AHEAD)]
        self._lock = threading.Lock()

    def take_buffer(self, dtype: torch.dtype, numel: int) -> tuple[Tensor, Callable[[Any], None]]:
        """Return memory [numel] to read a file into, and a function. Call the function with the copy's event, once the
        copy to the device is queued. If no buffer is free, or the read is small, the memory is new and temporary."""
        nbytes = numel * dtype.itemsize
        with self._lock:
            if not self._free or nbytes * 4 < self._nbytes:
                # torch's pinned allocator does not reuse it before the copy ends.
                return self._accelerator.host_memory(torch.Size([numel]), dtype), lambda _: None
            pages = self._taken()
            place, event = self._free.pop(0)  # the one whose copy was queued first
        if event is not None:
            self._accelerator.wait_on_host(event)
        tensor = pages.tensor(place * self._nbytes, dtype, numel)
        return tensor, lambda event: self._give_back(place, event)

    def _give_back(self, place: int, event: Any) -> None:
        with self._lock:
            self._free.append((place, event))
