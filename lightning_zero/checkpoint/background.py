"""Writes that go on while a rank trains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Background:
    """A thread that does what it is given, one after the other; what comes behind a failed write is not done."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether :meth:`wait` would raise. Nothing is waited for."""
        return self._error is not None

    @property
    def is_idle(self) -> bool:
        return self._last is None or self._last.done()

    def do(self, act: Callable[[], Any]) -> None:
        """Do this behind what was given before."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "lightning_zero-saves")
        self._last = self._pool.submit(self._run, act)

    def then(self, act: Callable[[], Any]) -> None:
        """Do this when all that was given before is done: here and now if it is."""
        if self.is_idle and self._error is None:
            act()
        else:
            self.do(act)

    def _run(self, act: Callable[[], Any]) -> None:
        if self._error is not None:
            return
        torch.set_num_threads(1)  # of this thread: the others are for those that train
        try:
            act()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait for all that was given.

        Raises:
            Exception: of the first that has failed; it is forgotten then.
        """
        if self._last is not None:
            self._last.result()
            self._last = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
