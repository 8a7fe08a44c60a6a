"""Records what compute waits for, how many bytes are moved, and when each lane (compute, gathers, disk ...) is busy.

::

    compute : forward 0 |waits | forward 1 ...          exposed: compute waits for another lane
    gather  :  [unit 1 ]        [unit 2 ]               spans
    disk    :     [unit 2 ]

A moment is a time of the host's clock, or an event on a stream. The time of an event is read after the event, so no
thread waits. Unless :func:`listen` has been called, nothing is recorded, and each function returns at once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from lightning_zero.device.accelerator import Accelerator

COMPUTE = "compute"
LANES = (COMPUTE, "gather", "reduce", "h2d", "d2h", "disk", "step")
WAITS = ("gather", "reduce", "transfer", "disk", "step", "agree", "sequence")  # what compute waits for, by kind
MOVES = ("gather", "reduce", "sequence", "h2d", "d2h", "disk_read", "disk_write")
MANY = 512  # waits to keep before those that are over are added up

_NOBODY: AbstractContextManager[None] = nullcontext()


class Span(NamedTuple):
    """A period of time, in seconds of this process's clock (``time.perf_counter``)."""

    lane: str  # one of :data:`LANES`
    what: str  # a unit or bucket, in words
    begin: float
    end: float
    waits_for: str = ""  # one of :data:`WAITS` if compute waited


class Open(AbstractContextManager[object]):
    """A span of a lane that has begun. It is recorded when ``end`` is called, on any thread."""

    def __init__(self, recorder: Recorder, lane: str, what: str, *, on_host: bool) -> None:
        self._recorder, self._lane, self._what, self._on_host = recorder, lane, what, on_host
        self._begin = recorder.moment(on_host=on_host)

    def end(self) -> None:
        self._recorder.add(self._lane, self._what, self._begin, self._recorder.moment(on_host=self._on_host))

    def __exit__(self, *error: object) -> None:
        self.end()


class Recorder:
    """Holds the recordings of this process, which all listeners share."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.waited: defaultdict[str, float] = defaultdict(float)  # seconds that compute has waited, as far as known
        self.moved: Counter[str] = Counter()  # bytes that this rank has received or sent, by kind
        self.spans: list[tuple[str, str, Any, Any, str]] | None = None
        self._waits = threading.local()  # ``inside``: for each open wait, the seconds of waits inside it
        self._later: deque[tuple[str, Any, Any]] = deque()
        self.lock = threading.Lock()
        self._origin: tuple[Any, float] | None = None

    def moment(self, *, on_host: bool = False) -> Any:
        """Return a moment: an event after all work queued on the current stream so far; with ``on_host``, or without
        streams, a time of the host's clock in seconds."""
        return time.perf_counter() if on_host else self._accelerator.moment()

    def add(self, lane: str, what: str, begin: Any, end: Any, waits_for: str = "") -> None:
        if (spans := self.spans) is not None:  # another thread may end it meanwhile
            spans.append((lane, what, begin, end, waits_for))

    @contextmanager
    def waiting(self, kind: str, what: str, *, on_host: bool) -> Iterator[None]:
        begin = self.moment(on_host=on_host)
        waits: list[float] = self._waits.__dict__.setdefault("inside", [])  # one list per thread
        waits.append(0.0)
        try:
            yield
        finally:
            end, inside = self.moment(on_host=on_host), waits.pop()
            if isinstance(begin, float):
                # A wait inside this one counts only for itself.
                with self.lock:
                    self.waited[kind] += end - begin - inside
                if waits:
                    waits[-1] += end - begin
            else:
                with self.lock:
                    self._later.append((kind, begin, end))
                if len(self._later) > MANY:
                    self.waited_so_far()
            self.add(COMPUTE, what, begin, end, kind)

    def waited_so_far(self) -> dict[str, float]:
        """Return the seconds that compute has waited in waits that are over, by kind of :data:`WAITS`."""
        with self.lock:
            while self._later and self._accelerator.is_over(self._later[0][2]):
                kind, begin, end = self._later.popleft()
                self.waited[kind] += self._accelerator.seconds(begin, end)
            return dict(self.waited)

    def moved_so_far(self) -> Counter[str]:
        """Return a copy of the counts of bytes moved so far, by kind of :data:`MOVES`."""
        with self.lock:
            return Counter(self.moved)

    def keep_spans(self) -> None:
        """Keep spans from now on. Waits for the device once, to align the device's clock with the host's."""
        self._accelerator.synchronize()
        self._origin = self.moment(), time.perf_counter()
        self.spans = []

    def take_spans(self) -> list[Span]:
        """Return the spans since :meth:`keep_spans` and stop keeping spans. Waits for the device."""
        self._accelerator.synchronize()
        kept, self.spans = self.spans or [], None
        return [Span(lane, what, self._time(begin), self._time(end), why) for lane, what, begin, end, why in kept]

    def _time(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment
        assert self._origin is not None
        return self._origin[1] + self._accelerator.seconds(self._origin[0], moment)


recorder: Recorder | None = None
_listeners = 0


def listen(accelerator: Accelerator) -> Recorder:
    """Start to record, unless this process records already. Return the recorder. Recording ends when :func:`stop` has
    been called as often as this function."""
    global recorder, _listeners
    if recorder is None:
        recorder = Recorder(accelerator)
    _listeners += 1
    return recorder


def stop() -> None:
    global recorder, _listeners
    _listeners -= 1
    if _listeners == 0:
        recorder = None


@contextmanager
def unheard() -> Iterator[None]:
    """Context manager that records nothing of its body: for trial steps, which must not count as steps of the run."""
    global recorder
    before, recorder = recorder, None
    try:
        yield
    finally:
        recorder = before


def keeper() -> Recorder | None:
    """Return the recorder if it keeps spans, else None."""
    return recorder if recorder is not None and recorder.spans is not None else None


def waiting(kind: str, what: str, *, on_host: bool = False) -> AbstractContextManager[None]:
    """Return a context that records its body as a wait of compute. With ``on_host``, or without streams, it is the host
    that waits, otherwise the current stream. ``kind``: one of :data:`WAITS`; ``what``: a unit or bucket."""
    # Threads of this package wait beside compute. A thread of the user or of autograd computes.
    if recorder is None or threading.current_thread().name.startswith("lightning_zero"):
        return _NOBODY
    return recorder.waiting(kind, what, on_host=on_host)


def moved(kind: str, nbytes: int) -> None:
    """Count ``nbytes`` that this rank moves. ``kind``: one of :data:`MOVES`."""
    if recorder is not None:
        with recorder.lock:  # several threads start transfers
            recorder.moved[kind] += nbytes


def begin(lane: str, what: str, *, on_host: bool = False) -> Open | None:
    """Begin and return a span of ``lane``; None if no spans are kept. ``on_host``: use the host's clock on GPUs too."""
    return None if recorder is None or recorder.spans is None else Open(recorder, lane, what, on_host=on_host)


def span(lane: str, what: str, *, on_host: bool = False) -> AbstractContextManager[object]:
    """Return a context that records its body as a span of ``lane``; see :func:`begin`."""
    return begin(lane, what, on_host=on_host) or _NOBODY


def profiled(kind: str, what: str) -> AbstractContextManager[None]:
    """Return a context that shows its body as ``zero: <kind> <what>`` in ``torch.profiler`` (NVTX under ``emit_nvtx``).
    ``kind``: ``gather``, ``wait for``, ``reduce``, ``transfer`` or ``step``; ``what``: a unit or bucket."""
    if not torch.autograd._profiler_enabled():
        return _NOBODY
    return torch.profiler.record_function(f"zero: {kind} {what}")
