"""The offloaded step of a bucket that was asked for and is not waited for yet."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


class AwaitedStep:
    """Between ``ask`` and ``wait`` the masters of the bucket belong to the step.

    Attributes:
        event: on a GPU, when it was asked for: what its results may overwrite is not read any more by then.
    """

    def __init__(self) -> None:
        self.event: Any = None
        self._future: Future[None] | None = None

    def ask(self, event: Any) -> Future[None]:
        """A step was asked for; whoever runs it ends the future."""
        self.event = event
        self._future = Future()
        return self._future

    def nothing_to_do(self) -> None:
        """A step was asked for, and this rank has nothing in it to do. It is asked for all the same: what is gathered
        when must not differ between ranks."""
        self.ask(None).set_result(None)

    @property
    def is_asked(self) -> bool:
        """Whether a step was asked for that nobody has waited for; the same on all ranks."""
        return self._future is not None

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._future is None or self._future.done()

    def wait(self) -> None:
        """Wait for the step; its error is raised here."""
        if self._future is not None:
            self._future.result()  # one that failed stays: what rests here is not what the user thinks
            self._future = self.event = None
