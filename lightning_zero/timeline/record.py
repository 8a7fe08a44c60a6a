"""Record some steps on all ranks and write the timeline on rank 0.

::

    step n | step n + 1 | ... | step n + k | all ranks: compare clocks before, collect spans after
           ^ keep_spans                    ^ take_spans: the host waits for the device only at these two moments
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_zero.comm.communicator import Communicator
from lightning_zero.device import recording
from lightning_zero.device.recording import Recorder, Span
from lightning_zero.timeline.page import MARK, RankLanes, chosen, lanes_of, page_html

ROUNDS = 20  # messages to compare clocks
AFTER = 5  # optimizer steps before the recording
STEPS = 2  # steps to record


class Timeline:
    """Records some steps of one engine, if ``zero.timeline`` names a ``folder``. ``wait_for_all``: a collective
    function that waits for offloaded optimizer steps."""

    def __init__(self, folder: str | None, comm: Communicator, wait_for_all: Callable[[], None]) -> None:
        self._folder, self._comm, self._wait_for_all = folder, comm, wait_for_all
        self._steps = 0
        self._recorder: Recorder | None = None
        self._offset = Offset(0.0, 0.0)

    def stepped(self) -> None:
        """Count an optimizer step, and begin or end the recording. Collective."""
        if self._folder is None:
            return
        self._steps += 1
        if self._steps == AFTER:
            self._begin()
        elif self._recorder is not None:
            self._mark()
            if self._steps == AFTER + STEPS:
                self._end()

    def run_ends(self, *, together: bool) -> None:
        """End a recording when the run ends. ``together``: whether all ranks call this and none has failed. If so, the
        recorded steps are written, which is collective; otherwise they are dropped."""
        if self._folder is None:
            return
        if self._recorder is not None:
            if together:
                self._end()
            else:
                self.close()
        elif 0 < self._steps < AFTER and self._comm.rank == 0:
            warnings.warn(
                f"zero.timeline: nothing was recorded, because the run ended after {self._steps} steps. Recording "
                f"begins after step {AFTER}.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Drop the recording. Sends no message and does not wait."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.spans = None  # without waiting: after an exception the device's work may never end
            recording.stop()

    def _begin(self) -> None:
        begins, ends = [], []
        for _ in range(ROUNDS):
            begins.append(time.perf_counter())
            self._comm.exchange(0)
            ends.append(time.perf_counter())
        all_clocks = self._comm.all_gather_objects((begins, ends), "the clocks of a timeline")
        self._offset = offsets([b for b, _ in all_clocks], [e for _, e in all_clocks])[self._comm.rank]
        self._recorder = recording.listen(self._comm.streams.accelerator)
        self._recorder.keep_spans()
        self._mark()

    def _mark(self) -> None:
        assert self._recorder is not None
        now = self._recorder.moment()
        self._recorder.add(MARK, "", now, now)

    def _end(self) -> None:
        assert self._recorder is not None
        closed = time.perf_counter()
        self._wait_for_all()
        try:
            taken = self._recorder.take_spans()
        finally:
            self.close()
        # Drop the main thread's waits inside ``wait_for_all``, which a run without a timeline does not have.
        spans = [span for span in taken if not (span.waits_for and span.begin >= closed)]
        moved = [s._replace(begin=s.begin + self._offset.seconds, end=s.end + self._offset.seconds) for s in spans]
        mine = [tuple(span) for span in moved], self._offset.error
        found = self._comm.collect(mine, "what a timeline has recorded")
        if found is not None:
            ranks = [lanes_of(rank, map(Span._make, theirs)) for rank, (theirs, _) in enumerate(found)]
            try:
                self._write(ranks, max(error for _, error in found))
            except Exception as error:  # such as a full disk: training continues without a timeline
                what = f"{self._folder}: {type(error).__name__}: {error}"
                warnings.warn(f"zero.timeline: {what}", stacklevel=2)

    def _write(self, ranks: list[RankLanes], error: float) -> None:
        assert self._folder is not None
        folder = Path(self._folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        ends = [end for lanes in ranks for end in lanes.ends]
        window = min(ends), max(max(ends), min(ends) + 1e-6)
        first = AFTER + 1
        last = first + ranks[0].steps - 1
        title = f"steps {first} to {last}" if last > first else f"step {first}"
        shown = chosen(ranks)
        note = f"Times of {len(ranks)} rank(s) on the clock of rank 0, accurate to {1e6 * error:.0f} µs. "
        if len(shown) < len(ranks):
            note += (
                f"Bars of {len(shown)} of them: rank 0, and those that wait least (others wait for them) and most. "
                "The table and trace.json have all ranks. "
            )
        note += "The table shows for how many ms per step computation waits, by kind. Dashed lines: ends of steps. "
        note += "Hover over a bar for details. trace.json opens in ui.perfetto.dev."
        events = [event for lanes in ranks for event in _events(lanes, window[0])]
        trace = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
        (folder / "trace.json").write_text(trace)
        (folder / "timeline.html").write_text(page_html(title, note, ranks, shown, window), encoding="utf-8")
        print(f"timeline of {title}: {folder / 'timeline.html'}", flush=True)


class Offset(NamedTuple):
    """Seconds to add to a rank's clock to get rank 0's clock, accurate to ``error`` seconds."""

    seconds: float
    error: float


def offsets(begins: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> list[Offset]:
    """Estimate the offset of each rank's clock from rounds of collectives. ``begins, ends``: seconds by rank and round.

    No rank can leave a collective before the last rank has entered. So each round bounds the offset o of rank r from
    both sides: ``begin[r] + o <= end[0]`` and ``begin[0] <= end[r] + o``. The tightest bounds of all rounds count.
    """
    found = []
    for own_begins, own_ends in zip(begins, ends, strict=True):
        low = max(begin - end for begin, end in zip(begins[0], own_ends, strict=True))
        high = min(end - begin for end, begin in zip(ends[0], own_begins, strict=True))
        # Processes of one host share a clock, so 0 is preferred where it is possible.
        found.append(Offset(0.0 if low <= 0 <= high else (low + high) / 2, max(0.0, high - low) / 2))
    return found


def _events(lanes: RankLanes, origin: float) -> Iterator[dict[str, Any]]:
    """Yield a rank's events of a Chrome trace (https://ui.perfetto.dev). ``origin``: seconds at the trace's time 0."""
    pid = lanes.rank
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    tid = 0
    for lane, rows in lanes.rows.items():
        for number, row in enumerate(rows):
            tid += 1
            name = lane if number == 0 else f"{lane} {number + 1}"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            for span in row:
                event = {
                    "ph": "X",
                    "name": f"waits: {span.what}" if span.waits_for else span.what,
                    "cat": f"exposed {span.waits_for}" if span.waits_for else lane,
                    "pid": pid,
                    "tid": tid,
                    "ts": round((span.begin - origin) * 1e6, 3),
                    "dur": round((span.end - span.begin) * 1e6, 3),
                }
                yield event | ({"cname": "terrible"} if span.waits_for else {})
    for end in lanes.ends:
        yield {"ph": "i", "name": "step", "s": "p", "pid": pid, "tid": 1, "ts": round((end - origin) * 1e6, 3)}
