"""The offloaded step of a bucket: asked for, and not waited for yet."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from lightning_zero.device import recording


class AwaitedStep:
    """Between ``ask`` and ``wait`` the masters of the bucket belong to the step.

    Attributes:
        event: on a GPU, recorded when the step was asked for: behind it nothing reads what the results overwrite.
    """

    def __init__(self) -> None:
        self.event: Any = None
        self._future: Future[None] | None = None

    def ask(self, event: Any) -> Future[None]:
        """Ask for a step. Whoever runs it ends the future."""
        self.event = event
        self._future = Future()
        return self._future

    def nothing_to_do(self) -> None:
        """Ask for a step in which this rank has nothing to do."""
        # Not left out: :attr:`is_asked` decides what is gathered ahead, and that must not differ between ranks.
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
            # A step that failed raises here and so stays: every later wait raises too. Otherwise a caller that has
            # caught the error once would go on with masters that are half stepped.
            if self._future.done():
                self._future.result()
            else:
                with recording.stands("step", "offloaded step", on_host=True):
                    self._future.result()
            self._future = self.event = None
