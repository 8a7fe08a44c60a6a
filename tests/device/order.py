"""Who comes after whom. A *party* does one thing after the other: a stream, a thread of the host, the disk.

The arithmetic is that of torch's own sanitizer for CUDA, which is pure Python. It knows streams only; here a thread is
a party of its own, so that what one thread has waited for is not taken for something that all have waited for.
"""

from __future__ import annotations

import itertools

from torch.cuda._sanitizer import StreamSynchronizations

from tests.device.timeline import Task

COMPUTE = 0  # the stream that there is from the beginning


class Trace:
    """The same order as tasks of a timeline: what parties do, with how long it takes, and what they wait for."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._last: dict[int, int] = {}  # task of a party
        self._events: dict[int, int | None] = {}  # the task that an event is behind

    def act(self, party: int, seconds: float = 0.0, resource: str = "", after: tuple[int, ...] = ()) -> None:
        self._last[party] = len(self.tasks)
        self.tasks.append(Task(party, seconds, resource, after))

    def record(self, event: int, party: int) -> None:
        self._events[event] = self._last.get(party)

    def wait(self, party: int, event: int) -> None:
        task = self._events.get(event)
        if task is not None:
            self.act(party, after=(task,))


class Order:
    """Vector clocks of parties, and of events that they have recorded.

    Attributes:
        names: of parties, for reports.
        trace: where all of it is noted, too; None: nowhere.
    """

    def __init__(self) -> None:
        self._clocks = StreamSynchronizations()
        self._numbers = itertools.count(1)
        self._parties = itertools.count(COMPUTE + 1)
        self._events = itertools.count(1)
        self._changes: dict[int, int] = {COMPUTE: 0}  # of what a party has seen
        self._followed: dict[tuple[int, int], int] = {}
        self._moment = self.new_event()
        self.names: dict[int, str] = {COMPUTE: "compute"}
        self.trace: Trace | None = None

    def new_party(self, name: str) -> int:
        party = next(self._parties)
        self._clocks.create_stream(party)
        self._changes[party] = 0
        self.names[party] = name
        return party

    def parties(self) -> list[int]:
        return list(self.names)

    def new_event(self) -> int:
        event = next(self._events)
        self._clocks.create_event(event)
        return event

    def act(self, party: int) -> int:
        """The party does something; the number of it."""
        number = next(self._numbers)
        self._clocks.update_seq_num(party, number)
        self._changes[party] += 1
        return number

    def record(self, event: int, party: int) -> None:
        """``event`` is behind all that the party has done and seen."""
        self._clocks.record_state(event, party)
        if self.trace is not None:
            self.trace.record(event, party)

    def wait(self, party: int, event: int, *, timed: bool = True) -> None:
        """What the party does from here on comes after ``event``; not ``timed``: it might as well have come before."""
        self._clocks.stream_wait_for_event(party, event)
        if self.trace is not None and timed:
            self.trace.wait(party, event)
        self._changes[party] += 1

    def has_seen(self, party: int, event: int) -> bool:
        """Whether the party comes after ``event`` already: to wait for it takes no time."""
        clock = self._clocks.current_sync_states[party]
        return all(clock.get(other, 0) >= number for other, number in self._clocks.recorded_sync_states[event].items())

    def follow(self, party: int, other: int) -> None:
        """What the party does from here on comes after all that ``other`` has done and seen."""
        if self._followed.get((party, other)) != self._changes[other]:
            self._followed[party, other] = self._changes[other]
            self.record(self._moment, other)
            self.wait(party, self._moment)

    def is_behind(self, party: int, other: int, number: int) -> bool:
        """Whether what the party does next comes after that act of ``other``."""
        return self._clocks.is_ordered_after(party, number, other)
