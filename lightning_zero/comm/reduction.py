"""Handles of operations in flight. A :class:`Pending` is one operation, a :class:`Reduction` up to three in a row."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.comm.streams import Streams
from lightning_zero.device import recording


class _Comm(Protocol):
    @property
    def streams(self) -> Streams: ...

    def wait_work(self, work: Any, label: str) -> None: ...


class Pending:
    """A logical operation in flight. ``wait`` makes its result usable on the current stream."""

    def __init__(
        self,
        comm: _Comm,
        label: str,
        works: list[Any],
        finish: Callable[[], Tensor],
        *,
        kind: str = "gather",
        event: Any = None,
        keep: Tensor | None = None,
    ):
        """
        Args:
            kind: what whoever waits stands still for: ``gather``, ``reduce``, or ``transfer`` where nothing is sent.
            finish: called once, after the works and the event, for the result.
            event: the end of what is queued on a stream.
            keep: memory that another stream reads until the event.
        """
        self._comm, self.label = comm, label
        self._kind = kind
        self._works = works
        self._finish: Callable[[], Tensor] | None = finish
        self._event = event
        self._result: Tensor | None = None
        self._keep = keep

    def done(self) -> bool:
        """Whether ``wait`` would wait for nothing, neither the host nor the current stream."""
        over = self._event is None or self._comm.streams.accelerator.is_over(self._event)
        return over and all(work.is_completed() for work in self._works)

    def abandon(self, deadline: float) -> bool:
        """Wait for the messages until ``deadline`` (monotonic) and drop them, after an exception. Peers may be gone.

        Returns:
            Whether the messages are over. If not, they may still read and write their memory at any time. The backend
            holds the tensors until then, and nobody may resize their storages.
        """
        for work in self._works:
            with contextlib.suppress(RuntimeError):
                # torch counts in milliseconds, and takes zero of them for "no limit": it would wait for ever.
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        is_over = all(work.is_completed() for work in self._works)
        # The caller frees the buffers next. Without this wait compute could reuse them while a stream still writes.
        self._wait_event()
        self._works, self._finish, self._keep = [], None, None
        return is_over

    def _wait_event(self) -> None:
        """Make the current stream wait for the operation's end, once. The host does not wait."""
        if self._event is not None:
            self._comm.streams.wait(self._event)
            self._event = None

    def wait(self) -> Tensor:
        """Wait for the operation and return its result. A second call returns the same result at once."""
        if self._works or self._event is not None:
            with recording.stands(self._kind, self.label, on_host=bool(self._works)):
                for work in self._works:
                    self._comm.wait_work(work, self.label)
                self._works = []
                # The event first: memory that is dropped after it is reused behind it, as compute's pool hands it out.
                self._wait_event()
        self._keep = None
        if self._finish is not None:
            # Once only: ``total`` of DirectTransport adds in place, and a second call would add everything again.
            finish, self._finish = self._finish, None
            self._result = finish()
        assert self._result is not None, f"{self.label}: waited for after it was abandoned"
        return self._result


class Reduction:
    """A reduction in flight, in two phases.

    ``land`` ends the first phase: this rank has the sum of its slice, over the ranks that share shards. ``land`` issues
    the operation that follows, a sum over replicas or the gather of an all-reduce. So all ranks must land reductions in
    one order. ``finish`` ends the second phase and returns the result.
    """

    def __init__(self, first: Pending, *later: Callable[[Tensor], Pending]) -> None:
        """
        Args:
            later: each is called with the result of the operation before it, and issues the next one.
        """
        self._now = first
        self._later = list(later)
        self._has_landed = False
        self.used_up: Tensor | None = None  # what was summed; the caller may leave it here until the end
        self.nbytes = 0  # of that; the caller keeps it here

    def done(self) -> bool:
        """Whether ``land`` would wait for nothing."""
        return self._now.done()

    def land(self) -> bool:
        """Wait for the current operation and issue the next one. Returns whether there was no next one."""
        value = self._now.wait()
        if not self._later:
            return True
        self._now, self._has_landed = self._later.pop(0)(value), True
        return False

    def finish(self) -> Tensor:
        """Land whatever has not landed yet, and return the result."""
        while not self.land():
            pass
        return self._now.wait()

    def abandon(self, deadline: float) -> None:
        """See :meth:`Pending.abandon`."""
        # What follows the first phase is issued as late as that is found complete: a rank that has raised meanwhile
        # issues it never, and it would be waited for until the deadline even where all ranks have raised in one place.
        self._now.abandon(time.monotonic() if self._has_landed else deadline)


class SpareBuffers:
    """Buffers that nobody uses, ``keep_nbytes`` of them at most: the largest.

    torch has a caching allocator for devices, none for the host. There large memory that is freed may go back to the
    system, and comes again page by page: a write to it takes several times as long.
    """

    def __init__(self, keep_nbytes: int) -> None:
        self._keep_nbytes = keep_nbytes
        self._kept: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum([buffer.nbytes for buffer in self._kept])

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer [numel] of any contents."""
        for index, buffer in enumerate(self._kept):
            if buffer.numel() == numel and buffer.dtype == dtype and buffer.device == device:
                return self._kept.pop(index)
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer [numel] that nobody reads or writes any more. On devices, whose streams may, it is let go."""
        if buffer.device.type == "cpu" and buffer.nbytes <= self._keep_nbytes:
            self._kept.append(buffer)
            self._kept.sort(key=lambda kept: kept.nbytes)
            while self.nbytes > self._keep_nbytes:
                self._kept.pop(0)
