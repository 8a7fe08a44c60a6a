"""Record which unit a rank computes when: forward, recomputation, backward.

In a backward, events are a kernel's need of a unit's weights and the arrival of its gradients. The time since the last
event belongs to that unit.
"""

from __future__ import annotations

from typing import Any

from lightning_zero.device import recording
from lightning_zero.device.recording import COMPUTE, Recorder


class ComputeLane:
    """The compute lane of one engine."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._calls: list[str] = []
        self._bar: tuple[str, Any] | None = None  # what is computed, since when
        self._last: Any = None  # the last moment of that

    def _keeper(self) -> Recorder | None:
        """Return the recorder if it keeps spans. Forget spans that were begun for an earlier recorder."""
        if (recorder := recording.keeper()) is not self._recorder:
            self._recorder, self._calls, self._bar, self._last = recorder, [], None, None
        return recorder

    def enters(self, what: str) -> None:
        """Begin a unit's forward."""
        if (recorder := self._keeper()) is not None:
            self._calls.append(what)
            self._switch(recorder, what, recorder.moment())

    def leaves(self) -> None:
        """End a unit's forward."""
        if (recorder := self._keeper()) is not None and self._calls:
            self._calls.pop()
            self._switch(recorder, self._calls[-1] if self._calls else None, recorder.moment())

    def backward_begins(self) -> None:
        """Begin a backward."""
        if (recorder := self._keeper()) is not None:
            self._switch(recorder, None, recorder.moment())

    def needs(self, what: str) -> None:
        """Note that the backward has reached a unit."""
        if (recorder := self._keeper()) is not None and (self._bar is None or self._bar[0] != what):
            self._switch(recorder, what, recorder.moment())

    def arrived(self, what: str) -> None:
        """Note that a gradient of a unit was computed."""
        if (recorder := self._keeper()) is None:
            return
        if (self._bar is None or self._bar[0] != what) and self._last is not None:
            self._switch(recorder, what, self._last)
        self._last = recorder.moment()

    def ends(self) -> None:
        """End the pass, also after an error."""
        if (recorder := self._keeper()) is not None and self._bar is not None:
            self._switch(recorder, None, self._last if self._last is not None else recorder.moment())
        self._calls, self._bar, self._last = [], None, None

    def _switch(self, recorder: Recorder, what: str | None, now: Any) -> None:
        if self._bar is not None:
            recorder.add(COMPUTE, self._bar[0], self._bar[1], now)
        self._bar, self._last = None if what is None else (what, now), now
