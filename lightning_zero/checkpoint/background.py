"""Writes that go on while a rank trains."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning_zero.device.host_threads import set_own_threads
from lightning_zero.ranks.progress import SILENT, Count, LongWork


class Background:
    """Does what it is given, one after the other; what comes behind a failed write is not done."""

    def __init__(self) -> None:
        self._copies: ThreadPoolExecutor | None = None
        self._writes: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether :meth:`wait` would raise. Nothing is waited for."""
        return self._error is not None

    @property
    def is_idle(self) -> bool:
        return self._last is None or self._last.done()

    def do(self, act: Callable[[], Any], copy: Callable[[], Any] | None = None) -> None:
        """Do this behind what was given before.

        Args:
            copy: is done first, and at once. Training may soon wait for it.
        """
        if self._copies is None or self._writes is None:
            self._copies = ThreadPoolExecutor(1, "lightning_zero-copies", _only_thread)
            self._writes = ThreadPoolExecutor(1, "lightning_zero-saves", _patient_thread)
        copied = self._copies.submit(copy) if copy is not None else None
        self._last = self._writes.submit(self._run, act, copied)

    def then(self, act: Callable[[], Any]) -> None:
        """Do this when all that was given before is done: here and now if it is."""
        if self.is_idle and self._error is None:
            act()
        else:
            self.do(act)

    def _run(self, act: Callable[[], Any], copied: Future[Any] | None) -> None:
        if self._error is not None:
            return
        try:
            if copied is not None:
                copied.exception()  # what has not been copied is read where it is
            act()
        except BaseException as error:
            self._error = error

    def wait(self, long_work: LongWork = SILENT, what: str = "", count: Count | None = None) -> None:
        """Wait for all that was given.

        Args:
            long_work: shows that, by the name ``what``, and how far it is if there is a ``count``.

        Raises:
            BaseException: of the first that has failed; it is forgotten then.
        """
        if self._last is not None:
            long_work.wait(self._last, what, count)
            self._last = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _only_thread() -> None:
    set_own_threads(1)  # of this thread: the others are for those that train


def _patient_thread() -> None:
    _only_thread()
    # On Linux each thread has a policy of its own. With this one it gives way at once to any that wakes up; one that is
    # only nice ends its turn first (3 ms), and ranks wake each other hundreds of times in a step.
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
