"""Tells the recording which unit a rank computes at what time: forward, recomputation, backward.

A forward has a beginning and an end. A backward tells of a unit when a kernel needs its weights (which come and go),
and when a gradient of it has arrived: what was computed since the event before then was that unit's.
"""

from __future__ import annotations

from typing import Any

from lightning_zero.device import recording
from lightning_zero.device.recording import COMPUTE, Recorder


class ComputeLane:
    """The lane of one engine's compute. Where nobody keeps spans each call costs a look."""

    def __init__(self) -> None:
        self._calls: list[str] = []
        self._bar: tuple[str, Any] | None = None  # what is computed, since when
        self._last: Any = None  # the last moment at which that was so

    def enters(self, what: str) -> None:
        """The module of a unit is called."""
        if (recorder := recording.keeper()) is not None:
            self._calls.append(what)
            self._switch(recorder, what, recorder.moment())

    def leaves(self) -> None:
        """It returned."""
        if self._calls and (recorder := recording.keeper()) is not None:
            self._calls.pop()
            self._switch(recorder, self._calls[-1] if self._calls else None, recorder.moment())

    def backward_begins(self) -> None:
        """What comes now is a backward."""
        if (recorder := recording.keeper()) is not None:
            self._switch(recorder, None, recorder.moment())

    def needs(self, what: str) -> None:
        """A backward comes to a unit."""
        if (recorder := recording.keeper()) is not None and (self._bar is None or self._bar[0] != what):
            self._switch(recorder, what, recorder.moment())

    def arrived(self, what: str) -> None:
        """A gradient of a unit has been computed."""
        if (recorder := recording.keeper()) is None:
            return
        if (self._bar is None or self._bar[0] != what) and self._last is not None:
            self._switch(recorder, what, self._last)
        self._last = recorder.moment()

    def ends(self) -> None:
        """The pass is over, or broken off."""
        self._calls = []
        if self._bar is not None and (recorder := recording.keeper()) is not None:
            self._switch(recorder, None, self._last if self._last is not None else recorder.moment())
        self._bar = self._last = None

    def _switch(self, recorder: Recorder, what: str | None, now: Any) -> None:
        if self._bar is not None:
            recorder.add(COMPUTE, self._bar[0], self._bar[1], now)
        self._bar, self._last = None if what is None else (what, now), now
