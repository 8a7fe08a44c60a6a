"""Pinned memory of a fixed size between a device and memory that is not pinned, or what rests in files.

Memory is taken when it is first needed, and kept: pinning takes longer than a copy. Off a GPU nothing is pinned, and
the rest is the same.
"""

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


class PinnedPair:
    """Two buffers of ``PAIR_NBYTES`` that pieces pass through by turns: one is filled while the other is emptied."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pages: HostPages | None = None

    @property
    def nbytes(self) -> int:
        """Memory that is taken now."""
        return 0 if self._pages is None else self._pages.nbytes

    def buffer(self, turn: int, dtype: torch.dtype, numel: int) -> Tensor:
        """The buffer of the ``turn``-th piece: [numel], at most ``PAIR_NBYTES``."""
        if self._pages is None:
            self._pages = HostPages(2 * PAIR_NBYTES, self._accelerator)
        return self._pages.tensor(turn % 2 * PAIR_NBYTES, dtype, numel)

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None


class Sender:
    """Sends host memory that is not pinned to the device, cast on the host: a thread waits for pieces, and no other."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pair = PinnedPair(accelerator)
        self._sent: list[Any] = [None, None]  # the ends of the last copies out of the buffers
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory that is taken now."""
        return self._pair.nbytes

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy ``source`` [n] into ``target`` [n] on the current stream. ``source`` has been read when this returns."""
        length = PAIR_NBYTES // target.element_size()
        with self._lock:
            for turn, low in enumerate(range(0, source.numel(), length)):
                piece = source[low : low + length]
                if self._sent[turn % 2] is not None:
                    self._accelerator.wait_on_host(self._sent[turn % 2])
                buffer = self._pair.buffer(turn, target.dtype, piece.numel())
                buffer.copy_(piece)
                target[low : low + length].copy_(buffer, non_blocking=True)
                self._sent[turn % 2] = self._accelerator.record()

    def close(self) -> None:
        self._pair.close()


class ReadAhead:
    """Memory for what is read from files ahead of a copy to the device: ``READ_AHEAD`` places of one size.

    A place is whole pages, so that the disk writes to it directly.
    """

    def __init__(self, accelerator: Accelerator, nbytes: int) -> None:
        """
        Args:
            nbytes: of the largest that is read.
        """
        self._accelerator = accelerator
        self._nbytes = round_up(nbytes, PAGE)
        self._pages: HostPages | None = None
        self._free: list[tuple[int, Any]] = [(place, None) for place in range(READ_AHEAD)]
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory that is taken now, for places."""
        return 0 if self._pages is None else self._pages.nbytes

    def take(self, dtype: torch.dtype, numel: int) -> tuple[Tensor, Callable[[Any], None]]:
        """Memory [numel] to read into, and what to call, with the event of its copy, when that has been queued.

        Where all places are taken, or one would be wasted, it is memory of the moment.
        """
        nbytes = numel * dtype.itemsize
        with self._lock:
            if not self._free or nbytes * 4 < self._nbytes:
                # torch's allocator of pinned memory does not hand it out again before the copy is over.
                return self._accelerator.host_memory(torch.Size([numel]), dtype), lambda _: None
            if self._pages is None:
                self._pages = HostPages(READ_AHEAD * self._nbytes, self._accelerator)
            place, event = self._free.pop(0)  # the one whose copy was queued first
        if event is not None:
            self._accelerator.wait_on_host(event)
        tensor = self._pages.tensor(place * self._nbytes, dtype, numel)
        return tensor, lambda event: self._give_back(place, event)

    def _give_back(self, place: int, event: Any) -> None:
        with self._lock:
            self._free.append((place, event))

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None
