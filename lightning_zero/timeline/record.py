"""Record some steps on all ranks and write the timeline on rank 0.

::

    step n | step n + 1 | ... | step n + k | all ranks: compare clocks before, collect spans after
           ^ keep_spans                    ^ take_spans: the host waits for the device only at these two moments
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import ConfigError, DebugConfig
from lightning_zero.device import recording
from lightning_zero.device.recording import Recorder, Span
from lightning_zero.planning.clocks import Offset, offsets
from lightning_zero.timeline.lanes import MARK, RankLanes, chosen, lanes_of
from lightning_zero.timeline.page import page_html
from lightning_zero.timeline.picture import can_draw, draw
from lightning_zero.timeline.trace import trace_json

ROUNDS = 20  # messages to compare clocks


def check_timeline(config: DebugConfig) -> None:
    """Raise ConfigError if ``zero.debug.timeline`` cannot be written."""
    if config.timeline is None:
        return
    try:
        Path(config.timeline).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"zero.debug.timeline: expected a folder to write to, got {config.timeline!r}: {error.strerror}. Change "
            "zero.debug.timeline."
        ) from None


class Timeline:
    """The timeline of one engine, if set in ``zero.debug``. ``settle`` (collective) finishes offloaded steps."""

    def __init__(self, config: DebugConfig, comm: Communicator, settle: Callable[[], None]) -> None:
        self._config, self._comm, self._settle = config, comm, settle
        self._after, self._count = config.timeline_steps
        self._steps = 0
        self._recorder: Recorder | None = None
        self._offset = Offset(0.0, 0.0)

    def stepped(self) -> None:
        """Count an optimizer step, and begin or end the recording. Collective."""
        if self._config.timeline is None:
            return
        self._steps += 1
        if self._steps == self._after:
            self._begin()
        elif self._recorder is not None:
            self._mark()
            if self._steps == self._after + self._count:
                self._end()

    def run_ends(self, *, together: bool) -> None:
        """Write the recorded steps at the end of the run. ``together``: all ranks call this and none has failed."""
        if self._config.timeline is None:
            return
        if self._recorder is not None:
            if together:
                self._end()
            else:
                self.close()
        elif 0 < self._steps < self._after and self._comm.rank == 0:
            warnings.warn(
                f"zero.debug.timeline: nothing was recorded, as the run ended after {self._steps} steps. Recording "
                f"begins after step {self._after}: lower zero.debug.timeline_steps.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Drop the recording. Sends no message and does not wait."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.drop_spans()
            recording.let_go()

    def _begin(self) -> None:
        self._offset = self._compare_clocks()
        self._recorder = recording.listen(self._comm.streams.accelerator)
        self._recorder.keep_spans()
        self._mark()

    def _mark(self) -> None:
        assert self._recorder is not None
        now = self._recorder.moment()
        self._recorder.add(MARK, "", now, now)

    def _compare_clocks(self) -> Offset:
        begins, ends = [], []
        for _ in range(ROUNDS):
            begins.append(time.perf_counter())
            self._comm.exchange(0)
            ends.append(time.perf_counter())
        all_clocks = self._comm.all_gather_objects((begins, ends), "the clocks of a timeline")
        return offsets([b for b, _ in all_clocks], [e for _, e in all_clocks])[self._comm.rank]

    def _take(self) -> list[Span]:
        assert self._recorder is not None
        try:
            return self._recorder.take_spans()
        finally:
            self.close()

    def _end(self) -> None:
        closed = time.perf_counter()
        self._settle()
        # Drop the main thread's waits inside ``settle``, which a run without a timeline does not have.
        spans = [span for span in self._take() if not (span.waits_for and span.begin >= closed)]
        moved = [s._replace(begin=s.begin + self._offset.seconds, end=s.end + self._offset.seconds) for s in spans]
        mine = [tuple(span) for span in moved], self._offset.error
        found = self._comm.collect(mine, "what a timeline has recorded")
        if found is not None:
            ranks = [lanes_of(rank, map(Span._make, theirs)) for rank, (theirs, _) in enumerate(found)]
            try:
                self._write(ranks, max(error for _, error in found))
            except Exception as error:  # training goes on without a timeline: full disk, broken matplotlib
                what = f"{self._config.timeline}: {type(error).__name__}: {error}"
                warnings.warn(f"zero.debug.timeline: {what}", stacklevel=2)

    def _write(self, ranks: list[RankLanes], error: float) -> None:
        assert self._config.timeline is not None
        folder = Path(self._config.timeline).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        ends = [end for lanes in ranks for end in lanes.ends]
        window = min(ends), max(max(ends), min(ends) + 1e-6)
        first = self._after + 1
        last = first + ranks[0].steps - 1
        title = f"steps {first} to {last}" if last > first else f"step {first}"
        shown = chosen(ranks)
        note = f"{len(ranks)} ranks on the clock of rank 0, to {1e6 * error:.0f} µs. "
        if len(shown) < len(ranks):
            note += (
                f"Lanes of {len(shown)} of them: rank 0, and those that wait least (others wait for them) and most. "
                "The table and trace.json have all. "
            )
        note += "Dashed: ends of steps. A bar says more under the pointer; trace.json opens in ui.perfetto.dev."
        (folder / "trace.json").write_text(trace_json(ranks, window[0]))
        (folder / "timeline.html").write_text(page_html(title, note, ranks, shown, window), encoding="utf-8")
        missing = ""
        if can_draw():
            draw(folder / "timeline.png", title, ranks, window)
        else:
            missing = " (no timeline.png: matplotlib is not installed)"
        print(f"timeline of {title}: {folder / 'timeline.html'}{missing}", flush=True)
