"""Record when a rank computes each unit: forward, recomputation, backward.

A backward reports two kinds of events: a kernel needs a unit's weights, or a gradient of a unit was computed. The time
from the previous event until a gradient counts for the gradient's unit.
"""

from __future__ import annotations

from typing import Any

from lightning_zero.device import recording
from lightning_zero.device.recording import COMPUTE, Recorder


class ComputeLane:
    """Records the bars of compute in one engine's timeline: which unit is computed when."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._calls: list[str] = []
        self._bar: tuple[str, Any] | None = None  # (what is computed, since when)
        self._last: Any = None  # the moment of the last event

    def _keeper(self) -> Recorder | None:
        """Return the recorder that keeps spans now, or None. If it is not the same as before, forget the open bar."""
        if (recorder := recording.keeper()) is not self._recorder:
            self._recorder, self._calls, self._bar, self._last = recorder, [], None, None
        return recorder

    def enters(self, what: str) -> None:
        """Record that the forward of the unit ``what`` begins."""
        if (recorder := self._keeper()) is not None:
            self._calls.append(what)
            self._switch(recorder, what, recorder.moment())

    def leaves(self) -> None:
        """Record that the forward of the unit entered last has ended."""
        if (recorder := self._keeper()) is not None and self._calls:
            self._calls.pop()
            self._switch(recorder, self._calls[-1] if self._calls else None, recorder.moment())

    def backward_begins(self) -> None:
        """Record that a backward begins."""
        if (recorder := self._keeper()) is not None:
            self._switch(recorder, None, recorder.moment())

    def needs(self, what: str) -> None:
        """Record that the backward needs the weights of the unit ``what``."""
        if (recorder := self._keeper()) is not None and (self._bar is None or self._bar[0] != what):
            self._switch(recorder, what, recorder.moment())

    def arrived(self, what: str) -> None:
        """Record that a gradient of the unit ``what`` was computed."""
        if (recorder := self._keeper()) is None:
            return
        if (self._bar is None or self._bar[0] != what) and self._last is not None:
            self._switch(recorder, what, self._last)
        self._last = recorder.moment()

    def ends(self) -> None:
        """Record that a backward has ended, or that an exception has ended a pass."""
        if (recorder := self._keeper()) is not None and self._bar is not None:
            self._switch(recorder, None, self._last if self._last is not None else recorder.moment())
        self._calls, self._bar, self._last = [], None, None

    def _switch(self, recorder: Recorder, what: str | None, now: Any) -> None:
        if self._bar is not None:
            recorder.add(COMPUTE, self._bar[0], self._bar[1], now)
        self._bar, self._last = None if what is None else (what, now), now
