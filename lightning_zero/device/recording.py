"""Records what compute stands still for, how many bytes move, and when what is under way: seconds, of one process.

::

    compute : forward 0 |stands| forward 1 ...          exposed: what the others have not been quick enough for
    gather  :  [unit 1 ]        [unit 2 ]               spans
    disk    :     [unit 2 ]

A host has a clock. On a device's streams a moment is an event that is recorded, and that is asked for its time when it
is over: nobody waits for it. Where nobody records, everything here costs a call.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from lightning_zero.device.accelerator import Accelerator

COMPUTE = "compute"
LANES = (COMPUTE, "gather", "reduce", "h2d", "d2h", "disk", "step")
STANDS = ("gather", "reduce", "transfer", "disk", "step", "agree", "sequence")  # what compute stands still for
MOVES = ("gather", "reduce", "sequence", "h2d", "d2h", "disk_read", "disk_write")
MANY = 512  # events of waits that nobody has asked for: beyond it those that are over are taken in

_NOBODY: AbstractContextManager[None] = nullcontext()


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        lane: one of :data:`LANES`.
        what: in words: a unit or bucket.
        begin, end: seconds of this process's clock (``time.perf_counter``).
        waits_for: one of :data:`STANDS` where compute stood still for it, else empty.
    """

    lane: str
    what: str
    begin: float
    end: float
    waits_for: str = ""


class Open:
    """A span that has begun. ``end`` may be called on another thread."""

    def __init__(self, recorder: Recorder, lane: str, what: str, *, on_host: bool) -> None:
        self._recorder, self._lane, self._what, self._on_host = recorder, lane, what, on_host
        self._begin = recorder.moment(on_host=on_host)

    def end(self) -> None:
        self._recorder.add(self._lane, self._what, self._begin, self._recorder.moment(on_host=self._on_host))


class Recorder:
    """What is recorded of this process, by everybody who listens.

    Attributes:
        stood: seconds that compute has stood still, by what for; those of a device that are known so far.
        moved: bytes that this rank has got or sent, by kind.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.stood: defaultdict[str, float] = defaultdict(float)
        self.moved: Counter[str] = Counter()
        self.spans: list[tuple[str, str, Any, Any, str]] | None = None
        self._waits = threading.local()  # ``inside``, of each wait that goes on: seconds that waits in it have taken
        self._later: deque[tuple[str, Any, Any]] = deque()  # waits of streams
        self._lock = threading.Lock()
        self._origin: tuple[Any, float] | None = None

    def moment(self, *, on_host: bool = False) -> Any:
        """Now: on the host's clock, or behind all that the current stream has queued."""
        return time.perf_counter() if on_host else self._accelerator.moment()

    def move(self, kind: str, nbytes: int) -> None:
        with self._lock:  # transfers are asked for by several threads
            self.moved[kind] += nbytes

    def add(self, lane: str, what: str, begin: Any, end: Any, waits_for: str = "") -> None:
        if (spans := self.spans) is not None:  # another thread may end it meanwhile
            spans.append((lane, what, begin, end, waits_for))

    @contextmanager
    def standing(self, kind: str, what: str, *, on_host: bool) -> Iterator[None]:
        begin = self.moment(on_host=on_host)
        waits: list[float] = self._waits.__dict__.setdefault("inside", [])  # each thread has its own
        waits.append(0.0)
        try:
            yield
        finally:
            end, inside = self.moment(on_host=on_host), waits.pop()
            if isinstance(begin, float):
                # What a wait inside of this one has taken counts as that one's.
                with self._lock:
                    self.stood[kind] += end - begin - inside
                if waits:
                    waits[-1] += end - begin
            else:
                with self._lock:
                    self._later.append((kind, begin, end))
                if len(self._later) > MANY:
                    self.stands_so_far()
            self.add(COMPUTE, what, begin, end, kind)

    def stands_so_far(self) -> dict[str, float]:
        """:attr:`stood`, with all waits of streams that are over. The host waits for none."""
        with self._lock:
            while self._later and self._accelerator.is_over(self._later[0][2]):
                kind, begin, end = self._later.popleft()
                self.stood[kind] += self._accelerator.seconds(begin, end)
            return dict(self.stood)

    def moved_so_far(self) -> Counter[str]:
        """A copy of :attr:`moved`: threads go on to count."""
        with self._lock:
            return Counter(self.moved)

    def keep_spans(self) -> None:
        """Keep spans from now on. The host waits for the device once: its clock is set beside the host's."""
        self._accelerator.synchronize()
        self._origin = self.moment(), time.perf_counter()
        self.spans = []

    def take_spans(self) -> list[Span]:
        """The spans since :meth:`keep_spans`, and keep no more. The host waits for the device."""
        self._accelerator.synchronize()
        kept, self.spans = self.spans or [], None
        return [Span(lane, what, self._time(begin), self._time(end), why) for lane, what, begin, end, why in kept]

    def drop_spans(self) -> None:
        """Keep no more, after an exception: nobody is waited for, as what a device waits for may never come."""
        self.spans = None

    def _time(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment
        assert self._origin is not None
        return self._origin[1] + self._accelerator.seconds(self._origin[0], moment)


_recorder: Recorder | None = None
_listeners = 0


def listen(accelerator: Accelerator) -> Recorder:
    """Record from now on, until :func:`let_go` has been called as often as this."""
    global _recorder, _listeners
    if _recorder is None:
        _recorder = Recorder(accelerator)
    _listeners += 1
    return _recorder


def let_go() -> None:
    """End one :func:`listen`."""
    global _recorder, _listeners
    _listeners -= 1
    if _listeners == 0:
        _recorder = None


@contextmanager
def unheard() -> Iterator[None]:
    """Inside, nothing is recorded: what is tried is no step of the run."""
    global _recorder
    before, _recorder = _recorder, None
    try:
        yield
    finally:
        _recorder = before


def keeper() -> Recorder | None:
    """The recorder, if somebody keeps spans."""
    return _recorder if _recorder is not None and _recorder.spans is not None else None


def stands(kind: str, what: str, *, on_host: bool = False) -> AbstractContextManager[None]:
    """Around what compute stands still for: the host's wait, or that of the current stream.

    Args:
        on_host: the host waits, also where there is a device.
    """
    if _recorder is None or not _computes():
        return _NOBODY
    return _recorder.standing(kind, what, on_host=on_host)


def _computes() -> bool:
    """Whether this thread computes: one of the user's, or of autograd's. The package's own wait beside it."""
    return not threading.current_thread().name.startswith("lightning_zero")


def moved(kind: str, nbytes: int) -> None:
    """Count bytes that move."""
    if _recorder is not None:
        _recorder.move(kind, nbytes)


def begin(lane: str, what: str, *, on_host: bool = False) -> Open | None:
    """Begin a span; None where nobody keeps spans.

    Args:
        on_host: of the host's clock, also where there is a device; else of the current stream.
    """
    return None if _recorder is None or _recorder.spans is None else Open(_recorder, lane, what, on_host=on_host)


def span(lane: str, what: str, *, on_host: bool = False) -> AbstractContextManager[None]:
    """Around what is a span; see :func:`begin`."""
    opened = begin(lane, what, on_host=on_host)
    return _NOBODY if opened is None else _until_end(opened)


@contextmanager
def _until_end(opened: Open) -> Iterator[None]:
    try:
        yield
    finally:
        opened.end()
