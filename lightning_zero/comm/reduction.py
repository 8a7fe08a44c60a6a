"""Handles of operations in flight: :class:`Pending` of one operation, :class:`Reduction` of up to three in sequence."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lightning_zero.device import recording
from lightning_zero.device.streams import Streams
from lightning_zero.ranks.waits import Waits


@dataclass(eq=False)
class Pending:
    """Handle of one operation in flight. ``wait`` returns the operation's result, for use on the current stream."""

    _streams: Streams
    _waits: Waits
    label: str
    _works: list[Any]
    _finish: Callable[[], Tensor] | None  # called once, after the works and the event; returns the result
    _: KW_ONLY
    kind: str = "gather"  # for recordings: ``gather``, ``reduce``, or ``transfer`` where nothing is sent
    event: Any = None  # the end of what the operation has queued on a stream
    keep: Tensor | None = None  # memory that another stream reads until the event
    _result: Tensor | None = None

    def done(self) -> bool:
        """Return whether ``wait`` would make neither the host nor the current stream wait."""
        over = self.event is None or self._streams.accelerator.is_over(self.event)
        return over and all(work.is_completed() for work in self._works)

    def abandon(self, deadline: float) -> bool:
        """Wait for the messages until ``deadline`` (in ``time.monotonic``) after an exception, then drop their handles.
        Return whether all messages have ended. If False, the caller must not resize the tensors' storages."""
        for work in self._works:
            with contextlib.suppress(RuntimeError):
                # torch rounds to milliseconds and takes zero as "no limit".
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        is_over = all(work.is_completed() for work in self._works)
        # The caller frees the buffers next. Without this wait compute could reuse them while a stream still writes.
        self._wait_event()
        self._works, self._finish, self.keep = [], None, None
        return is_over

    def _wait_event(self) -> None:
        self._streams.wait(self.event)
        self.event = None

    def wait(self) -> Tensor:
        """Wait for the operation and return its result tensor. Later calls return the same tensor at once."""
        if self._works or self.event is not None:
            with recording.waiting(self.kind, self.label, on_host=bool(self._works)):
                for work in self._works:
                    self._waits.wait_work(work, self.label, agrees=False)
                self._works = []
                # Before memory is dropped, so that compute's pool reuses it only after the event.
                if self.event is not None:
                    self._wait_event()
        self.keep = None
        if self._finish is not None:
            # Call it once only: ``total`` of DirectTransport adds in place and would add everything again.
            finish, self._finish = self._finish, None
            self._result = finish()
        assert self._result is not None, f"{self.label}: waited for after it was abandoned"
        return self._result


class Reduction:
    """Handle of a reduction in flight, which has up to three phases: the sum of this rank's slice over the ranks that
    share shards (in a sum of two levels, over those of this node), a sum over nodes or replicas, and the gather of an
    all-reduce. ``land`` waits for one phase and issues the next; ``finish`` waits for all phases. See
    [Note: one order of collectives] in ``communicator.py``."""

    def __init__(self, first: Pending, *later: Callable[[Tensor], Pending]) -> None:
        """``first``: handle of the first operation. ``later``: a function for each later operation, called with the
        result of the operation before. Each function issues its operation and returns the operation's handle."""
        self._now = first
        self._later = list(later)
        self._has_landed = False
        self._result: Tensor | None = None
        self.used_up: Tensor | None = None  # the buffer that was summed; the caller may leave it here until the end
        self.nbytes = 0

    def done(self) -> bool:
        """Return whether ``land`` would return without a wait."""
        return self._now.done()

    def land(self) -> bool:
        """Wait for the current operation, then issue the next one. Return True if there is no next one. Collective."""
        value = self._now.wait()
        if self._later:
            self._now, self._has_landed = self._later.pop(0)(value), True
            return False
        self._result = value
        return True

    def finish(self) -> Tensor:
        """Wait for all phases that remain and return the result. Collective."""
        while self._result is None:
            self.land()
        return self._result

    def abandon(self, deadline: float) -> None:
        """After an exception, drop all operations. Before that, wait for the current operation until ``deadline`` (in
        ``time.monotonic``), but only if it is the first operation."""
        # Ranks that raised before finding the first phase complete never issue the second, so do not wait for it.
        self._now.abandon(time.monotonic() if self._has_landed else deadline)


class SpareBuffers:
    """Keeps the largest host buffers for reuse, up to ``keep_nbytes`` bytes. torch returns large blocks of host memory
    to the system, and the first writes to new blocks take several times as long because of page faults."""

    def __init__(self, keep_nbytes: int) -> None:
        self._keep_nbytes = keep_nbytes
        self._kept: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum([buffer.nbytes for buffer in self._kept])

    def take_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        for index, buffer in enumerate(self._kept):
            if buffer.numel() == numel and buffer.dtype == dtype and buffer.device == device:
                return self._kept.pop(index)
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Keep ``buffer`` [numel], which the caller no longer uses, for reuse if it is in host memory."""
        if buffer.device.type == "cpu" and buffer.nbytes <= self._keep_nbytes:
            self._kept.append(buffer)
            self._kept.sort(key=attrgetter("nbytes"))
            nbytes = self.nbytes
            while nbytes > self._keep_nbytes:
                nbytes -= self._kept.pop(0).nbytes
