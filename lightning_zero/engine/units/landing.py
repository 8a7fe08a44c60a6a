"""Brings gradients to the host: what is found out about them on the way, and a thread that adds those of micro-batches.

::

    reduce : reduction 1 | reduction 2
    d2h    :              [piece 1][piece 2][piece 3]...      into two pinned buffers by turns
    thread :                       [add 1]  [add 2]  [add 3]

The buffers are all the host memory that it takes, whatever the sizes of buckets.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lightning_zero.comm.profiling import profiled
from lightning_zero.comm.streams import HELD, Streams
from lightning_zero.device.host_threads import set_own_threads
from lightning_zero.planning.memory import PAIR_NBYTES
from lightning_zero.tiers.pinned import PinnedPair


class Landing:
    """What the gradients of one engine have in common on their way to the host.

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
