"""Copy between a device and unpinned host memory or files, through pinned buffers of a fixed size. The buffers are
allocated at first use and reused, because pinning takes longer than a copy. Without a GPU nothing is pinned."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lightning_zero.device import recording
from lightning_zero.device.accelerator import Accelerator, Event
from lightning_zero.device.host_threads import set_own_threads
from lightning_zero.device.streams import HELD, Streams
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
        """Return a tensor [numel] of at most ``PAIR_NBYTES``: in the first buffer if ``turn``, the index of the piece,
        is even, else in the second buffer."""
        return self._taken().tensor(turn % 2 * PAIR_NBYTES, dtype, numel)


class Sender(PinnedPair):
    """Copies unpinned host memory to the device. The host casts to the target's dtype, and only the caller waits."""

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


class Landing:
    """Adds gradients of later micro-batches, in a thread, to the gradients of earlier micro-batches in host memory.

    ::

        reduce : reduction 1 | reduction 2
        d2h    :              [piece 1][piece 2][piece 3]...      into two pinned buffers by turns
        thread :                       [add 1]  [add 2]  [add 3]

    `asked_norms` holds the norm types that callers have asked for, `asked_finite` whether they need the finite check.
    """

    def __init__(self, streams: Streams, threads: int) -> None:
        """`threads`: how many threads torch's kernels use inside the thread that adds gradients."""
        self.streams = streams
        self.asked_norms: set[float] = set()
        self.asked_finite = False
        self._threads = threads
        self._pair = PinnedPair(streams.accelerator)
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: deque[tuple[Future[None], Tensor]] = deque()

    def compute_asked(self, grad: Tensor) -> tuple[dict[float, Tensor], Tensor | None]:
        """Return the norms of `grad` by norm type, and whether `grad` is finite, computed on the device. Only what
        callers have asked for before is computed: other norms are missing, and the second result can be None."""
        wide = torch.promote_types(grad.dtype, torch.float32)
        norms = {kind: torch._foreach_norm([grad], kind, dtype=wide)[0] for kind in sorted(self.asked_norms)}
        return norms, torch.isfinite(grad).all() if self.asked_finite else None

    def add(self, reduced: Tensor, target: Tensor) -> Future[None]:
        """Add `reduced` [n], on the device, to pinned `target` [n] in a thread that uses both until the future is done.

        Earlier copies to `target` must have been queued before this call."""
        # Device memory is kept until this thread knows that the add has ended. The wait bounds how much is kept.
        while self._under_way and (len(self._under_way) >= HELD or self._under_way[0][0].done()):
            self._under_way.popleft()[0].exception()  # a read of the gradient raises the error
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "lightning_zero-landing")
        future = self._pool.submit(self._add, reduced, target, self.streams.mark())
        self._under_way.append((future, reduced))
        return future

    def _add(self, reduced: Tensor, target: Tensor, event: Event) -> None:
        set_own_threads(self._threads)  # threads and device are settings of each thread
        accelerator = self.streams.accelerator
        accelerator.bind_thread()
        length = PAIR_NBYTES // reduced.element_size()
        before: tuple[Event, Tensor, Tensor] | None = None
        with recording.profiled("transfer", "gradient"), torch.inference_mode(False), torch.no_grad():
            for turn, low in enumerate(range(0, reduced.numel(), length)):
                piece = reduced[low : low + length]
                buffer = self._pair.buffer(turn, piece.dtype, piece.numel())
                with self.streams.on("d2h", after=event):
                    buffer.copy_(piece, non_blocking=True)
                    arrived = self.streams.mark()
                # Add the previous piece while this one is copied. The next piece reuses the previous one's buffer.
                self._land(before)
                before = arrived, buffer, target[low : low + length]
            self._land(before)

    def _land(self, piece: tuple[Event, Tensor, Tensor] | None) -> None:
        if piece is not None:
            arrived, buffer, target = piece
            self.streams.accelerator.wait_on_host(arrived)
            target.add_(buffer)  # add before rounding, as on the device

    @property
    def nbytes(self) -> int:
        return self._pair.nbytes

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._under_way.clear()
        self._pair.close()


class ReadAhead(_Pinned):
    """``READ_AHEAD`` pinned buffers of ``nbytes``, into which files are read ahead of their copy to the device."""

    def __init__(self, accelerator: Accelerator, nbytes: int) -> None:
        self._nbytes = round_up(nbytes, PAGE)
        super().__init__(accelerator, READ_AHEAD * self._nbytes)
        self._free: list[tuple[int, Any]] = [(place, None) for place in range(READ_AHEAD)]
        self._lock = threading.Lock()

    def take_buffer(self, dtype: torch.dtype, numel: int) -> tuple[Tensor, Callable[[Any], None]]:
        """Return host memory [numel] to read a file into, and a function that gives the memory back. Queue the copy to
        the device, then call the function with an event recorded after the copy. If no buffer is free, or the read is
        small, the memory is allocated for this call."""
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
