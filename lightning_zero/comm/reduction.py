"""Operations in flight: a gather is one message for each rank's part, a reduction may be several in a row."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor

from lightning_zero.comm.streams import Streams


class _Comm(Protocol):
    @property
    def streams(self) -> Streams: ...

    def wait_work(self, work: Any, label: str, *, on_device: bool = False) -> None: ...


class Pending:
    """A logical operation in flight. ``wait`` makes its result usable on the current stream."""

    def __init__(self, comm: _Comm, label: str, works: list[Any], finish: Callable[[], Tensor]):
        self._comm, self.label = comm, label
        self._works = works
        self._finish: Callable[[], Tensor] | None = finish
        self._event: Any = None
        self._result: Tensor | None = None
        self._keep: Any = None  # memory that another stream reads until the event

    def done(self) -> bool:
        """Whether ``wait`` would wait for nothing, neither the host nor the current stream."""
        over = self._event is None or self._comm.streams.accelerator.is_over(self._event)
        return over and all(work.is_completed() for work in self._works)

    def abandon(self, deadline: float) -> None:
        """After an exception: let the messages end, until ``deadline`` (monotonic); the other ranks may be gone."""
        for work in self._works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        self._wait_event()
        self._works, self._finish, self._keep = [], None, None

    def _wait_event(self) -> None:
        if self._event is not None:
            self._comm.streams.wait(self._event)
            self._event = None

    def wait(self) -> Tensor:
        for work in self._works:
            self._comm.wait_work(work, self.label)
        self._works = []
        self._wait_event()
        self._keep = None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        assert self._result is not None, f"{self.label}: waited for after it was abandoned"
        return self._result


class Reduction:
    """A reduction in flight, in two phases.

    ``land`` ends the first: this rank has the sum of its slice, over the ranks that share shards. It issues what
    follows, a sum over replicas or the gather of an all-reduce, so landings come in one order on all ranks. ``finish``
    ends the second, and gives the result.
    """

    def __init__(self, first: Pending, *later: Callable[[Tensor], Pending]) -> None:
        """
        Args:
            later: each issues what follows, with what came before it.
        """
        self._now = first
        self._later = list(later)

    def done(self) -> bool:
        """Whether ``land`` would wait for nothing."""
        return self._now.done()

    def land(self) -> bool:
        """Whether that was all of it."""
        value = self._now.wait()
        if not self._later:
            return True
        self._now = self._later.pop(0)(value)
        return False

    def finish(self) -> Tensor:
        while not self.land():
            pass
        return self._now.wait()

    def abandon(self, deadline: float) -> None:
        """See :meth:`Pending.abandon`."""
        self._now.abandon(deadline)
