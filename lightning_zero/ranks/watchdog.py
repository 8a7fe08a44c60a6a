"""Runs threads beside training: they post what this rank is doing, and end a process that waits for a dead rank.

[Note: what a rank does when another dies]
A rank that waits inside of the engine raises in time: PeerError over gloo, whose connection breaks, else StallError
(``ranks/waits.py``); who has died it finds out over the store (``ranks/peers.py``). Elsewhere (say, in a metric's
barrier, or on a device) a backend waits for its own timeout unless it notices the death; it never does under NCCL or
when a network is cut. So each rank also listens::

    no beat of the next rank for zero.stall_timeout_s,        -> prints it; ends this process after a longer standstill
    or the store is gone or silent                               (``_patience_s``)
    under NCCL: the process of the rank before or after this  -> prints it; ends this process after a standstill of
    one has ended on this machine without a goodbye              ten seconds (``STANDSTILL_S``)

No process is ended while its training thread progresses, or while a person types into it. A launcher may be sooner:
Lightning's looks every 5 s. A rank that has raised saves only if all have (``trainer/interruptions.py``), and does not
wait for others at its exit (``Ended`` in ``trainer/processes.py``).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from multiprocessing.util import Finalize
from typing import Any, Protocol, TypeVar
from weakref import WeakSet, finalize, ref

from lightning_zero.ranks.peers import DYING_S, Peers, RunningTime

EVERY_S = 2.0  # seconds between posts
RANKS_AT_THIS_PACE = 512  # more ranks post less often, because all use one store
ASKING = 32  # number of ranks that check whether all wait for each other; each reads what all have posted
STANDSTILL_S = 10.0  # seconds for launchers to act and exceptions to arrive, after a rank has ended
EXIT_CODE = 1
ANSWER_S = 5.0  # seconds that a store may take to answer
STILL_S = 1.0  # added to the time in which what ranks do is posted

T = TypeVar("T")


_CONNECTIONS: list[tuple[Any, Any]] = []


def connection_of_its_own(store: Any) -> Any:
    """Return a second connection to ``store``, for threads. Opened once, as looking up host names can take seconds."""
    if not _CONNECTIONS or _CONNECTIONS[0][0] is not store:
        _CONNECTIONS[:] = [(store, store.clone() if hasattr(store, "clone") else store)]
    return _CONNECTIONS[0][1]


def within(seconds: float, ask: Callable[[], T], default: T) -> T:
    """Call ``ask`` in a thread. Return its result; ``default`` if it takes longer than ``seconds``, because behind a
    cut network a store neither answers nor fails, or if no thread can be started: some versions of Python start none
    once the interpreter is ending."""
    found = [default]

    def answer() -> None:
        found[0] = ask()

    thread = threading.Thread(target=answer, name="lightning_zero-asks", daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(seconds)
    return found[0]


class Watched(Protocol):
    """What a watchdog reads of this rank's :class:`Waits`."""

    rank: int
    world_size: int
    stall_timeout_s: float
    place: str
    issued: int
    asked: Counter[str]

    @property
    def waiting(self) -> str: ...


class Watchdog:
    """Posts what this rank is doing, watches other ranks, and ends this process if it is stuck while one is dead.

    Args:
        watched: this rank's :class:`Waits`. Held weakly; the threads end when it is garbage.
        store: a connection on which no call blocks for long.
        number: a part of this watchdog's store keys; equal on all ranks, and used only once.
        notices_broken_connections: the backend notices broken connections itself.
        end: ends this process; tests replace it.
    """

    last_number = 0

    def __init__(
        self,
        watched: Watched,
        store: Any,
        *,
        number: int,
        notices_broken_connections: bool,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._number = Watchdog.last_number = number
        self._prefix = f"lightning_zero/{number}"
        self._watched = ref(watched)
        self._rank, self._world_size = watched.rank, watched.world_size
        self._limit_s = watched.stall_timeout_s
        self._notices_broken_connections, self._end = notices_broken_connections, end
        self._meetings = 0
        self._left = False
        self._leaving = threading.Event()
        self._store = store
        self._every_s = EVERY_S * max(1.0, self._world_size / RANKS_AT_THIS_PACE)
        self.running_s = RunningTime(3 * self._every_s)
        self.peers = Peers(store, self._prefix, self._rank, self._world_size, self._every_s, self.running_s)
        # Longer than the engine's own errors take, because those say more.
        self._patience_s = 1.2 * self._limit_s + 2 * self.peers.roll_call_s
        self._gone: tuple[str, float] | None = None  # who is gone, and how long this process may stand still for it
        self._trains = _Standstill(threading.get_ident(), self.running_s)
        self._heard_s = self.running_s()  # when the store last answered
        self._stop = threading.Event()
        targets = {"places": self._run, "judges": self._judge, "leaves": self._leave}
        self._threads = {
            name: threading.Thread(target=target, name=f"lightning_zero-{name}", daemon=True)
            for name, target in targets.items()
        }
        _say_goodbye_at_the_end()
        _LIVE.add(self)
        for thread in self._threads.values():
            thread.start()
        finalize(watched, self._stop.set)  # the event's method: a method of this object would keep the object alive

    @staticmethod
    def latest(world_size: int) -> Watchdog | None:
        """Return the newest watchdog of ``world_size`` ranks that has not left, or None."""
        found = [dog for dog in _LIVE if dog._world_size == world_size and not dog._left]
        return max(found, key=lambda dog: dog._number, default=None)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _run(self) -> None:
        posted: tuple[str, str] | None = None
        stuck = ""  # the wait whose counts are posted
        while not self._stop.wait(self._every_s if self.peers.knows_holder else 0.1):
            watched = self._watched()
            if watched is None and self._gone is None:
                break
            try:
                if watched is not None and (watched.place, watched.waiting) != posted:
                    posted = watched.place, watched.waiting
                    self._store.set(self._key(self._rank), posted[0])
                    self._store.set(f"{self._key(self._rank)}/waits", posted[1])
                elif watched is not None and posted is not None and posted[1] not in ("", stuck):
                    stuck = posted[1]  # it has lasted longer than a beat
                    self._store.set(f"{self._key(self._rank)}/stuck", json.dumps([stuck, dict(watched.asked)]))
                self.peers.answer()
                self._listen()
            except Exception:  # the store is gone
                if not self.peers.holder_left:
                    quick = not self._notices_broken_connections and self._holder_ends()
                    self._note(self.peers.without_store(), STANDSTILL_S if quick else self._patience_s)
                return
            self._heard_s = self.running_s()
            watched = None  # else it would live through the next wait
        if self._watched() is None:
            self.leave()  # garbage instead of closed: other ranks may keep their watchdogs

    def _holder_ends(self) -> bool:
        """Return whether rank 0's process, which holds the store, ends. Waits up to a second for that end."""
        deadline = time.monotonic() + DYING_S
        while not (ended := self.peers.holder_is_dead) and time.monotonic() < deadline and not self._stop.wait(0.05):
            pass
        return ended

    def _judge(self) -> None:
        """End this process when it is stuck. Runs on its own thread, because :meth:`_run` may wait for the store."""
        while not self._stop.wait(self._every_s):
            watched = self._watched()
            if watched is None and self._gone is None:
                return
            if self.running_s() - self._heard_s > self._limit_s and not self.peers.holder_left:
                self._note(self.peers.without_store(), self._patience_s)
            self._end_if_stuck(watched)
            watched = None  # else it would live through the next wait

    def _listen(self) -> None:
        ended = None if self._notices_broken_connections else self.peers.ended_neighbour()
        silent = self.peers.silent_neighbour(self._limit_s)
        for who, limit_s in ((ended, min(STANDSTILL_S, self._limit_s)), (silent, self._patience_s)):
            if who is not None:
                self._note(who, limit_s)
        if ended is None and silent is None:
            self._gone = None  # the rank was only slow

    def _note(self, who: str, limit_s: float) -> None:
        if self._left and self._gone is None:
            return  # this rank has said goodbye: all end, in any order
        if self._gone is None:
            watched = self._watched()
            place = f"; this rank is at: {watched.place}" if watched is not None else ""
            print(f"rank {self._rank}: {who}{place}", file=sys.stderr, flush=True)
        if self._gone is None or limit_s < self._gone[1]:
            self._gone = who, limit_s

    def _end_if_stuck(self, watched: Watched | None) -> None:
        state = (watched.place, watched.issued) if watched is not None else None
        still_s = self._trains.seconds(state)
        # A process that a person types into stands still while the person thinks.
        typed_into = hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "__IPYTHON__")
        if self._gone is None or still_s < self._gone[1] or typed_into:
            return
        who, _ = self._gone
        with contextlib.suppress(Exception):
            place = f" (at: {watched.place})" if watched is not None else ""
            print(
                f"rank {self._rank}{place} ends: it has made no progress for {still_s:.0f} s, and {who}",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
        within(ANSWER_S, lambda: self.peers.tell_end(who), None)
        # An exception would end this thread alone, and no exit handler runs while training is inside a backend.
        self._end(EXIT_CODE)

    def paused_s(self) -> float:
        """Return the seconds in which this process was paused since this watchdog was made."""
        if self._threads["judges"].is_alive():  # else nobody has called, which would count as a pause
            self.running_s()
        return self.running_s.paused_s

    def places_and_silent(self) -> tuple[list[str], list[int]] | None:
        """Return what every rank is doing, and which ranks do not answer; ``None`` if the store is gone."""

        def ask() -> tuple[list[str], list[int]] | None:
            with contextlib.suppress(Exception):  # the store is gone
                return self.places(), self.peers.silent()
            return None

        return within(2 * self.peers.roll_call_s + ANSWER_S, ask, None)

    def culprit(self) -> str:
        """Return a sentence about the rank that has ended, after a connection has broken. Takes some seconds."""
        return within(2 * self.peers.roll_call_s + ANSWER_S, self.peers.culprit, self.peers.without_store())

    def tell(self, error: BaseException) -> None:
        within(ANSWER_S, lambda: self.peers.tell(error), None)

    def places(self) -> list[str]:
        found = []
        for rank in range(self._world_size):
            place = "unknown: it has posted nothing"
            watched = self._watched()
            if watched is not None and rank == self._rank:
                place = watched.place
            else:
                with contextlib.suppress(Exception):
                    if self._store.check([self._key(rank)]):
                        place = self._store.get(self._key(rank)).decode()
            found.append(place)
        return found

    def all_wait(self) -> bool:
        """Return whether all ranks still wait for what they waited for seconds ago: then no message will come."""

        return self._stays(self._waits, default=[""]) is not None

    def _stays(self, ask: Callable[[], list[str] | None], default: list[str] | None) -> list[str] | None:
        """Call ``ask`` twice, seconds apart. Return the result if unchanged, else None; ``default`` if it fails."""

        def twice() -> list[str] | None:
            with contextlib.suppress(Exception):  # the store is gone
                if (before := ask()) is not None:
                    time.sleep(2 * self._every_s + STILL_S)
                    return before if before == ask() else None
                return None
            return default

        return within(2 * self._every_s + STILL_S + ANSWER_S, twice, default)

    def _waits(self) -> list[str] | None:
        """Return what every rank waits for, as posted; ``None`` if some rank does not wait."""
        found = []
        for rank in range(self._world_size):
            key = f"{self._key(rank)}/waits"
            found.append(self._store.get(key).decode() if self._store.check([key]) else "")
        return found if all(found) else None

    def waits_for_each_other(self) -> list[str] | None:
        """Return each rank's wait, by label, if all ranks wait, and each for a message that some rank has not sent;
        else ``None``. Checks twice, a few seconds apart."""
        if self._rank % (1 + self._world_size // ASKING):
            return None  # the asking ranks raise and so tell the others
        if (waits := self._stays(self._stuck, default=None)) is None:
            return None
        within(ANSWER_S, lambda: self._store.set(f"{self._prefix}/nobody_comes", json.dumps(waits)), None)
        return [wait.partition(": ")[2] for wait in waits]

    def _stuck(self) -> list[str] | None:
        """Return each rank's wait if some rank has not sent the message of each; else ``None``."""
        if self._store.check([f"{self._prefix}/nobody_comes"]) and (watched := self._watched()) is not None:
            told: list[str] = json.loads(self._store.get(f"{self._prefix}/nobody_comes"))
            if told[self._rank] == watched.waiting:
                return told  # another rank has found it, has raised, and waits no longer
        waits = self._waits()
        if waits is None:
            return None
        counts = []
        for rank, wait in enumerate(waits):
            key = f"{self._key(rank)}/stuck"
            if not self._store.check([key]):
                return None
            found, asked = json.loads(self._store.get(key))
            if found != wait:
                return None
            counts.append(asked)
        for asked, wait in zip(counts, waits, strict=True):
            label = wait.partition(": ")[2]
            if all(other.get(label, 0) >= asked.get(label, 0) for other in counts):
                return None  # all have sent it: it is on its way
        return waits

    def missing(self, place: str, timeout_s: float) -> list[int]:
        """Post ``place``, a point of the program. Return the other ranks that do not post it in ``timeout_s``."""
        self._meetings += 1  # so that posts of earlier meetings do not count
        key = f"{self._prefix}/meeting {self._meetings} {place}"
        missing = [rank for rank in range(self._world_size) if rank != self._rank]
        deadline = time.monotonic() + timeout_s

        def meet() -> None:
            with contextlib.suppress(Exception):  # the store is gone
                self._store.set(f"{key}/{self._rank}", "")
                while missing and time.monotonic() < deadline:
                    missing[:] = [rank for rank in missing if not self._store.check([f"{key}/{rank}"])]
                    time.sleep(0.02)

        within(timeout_s + ANSWER_S, meet, None)
        return list(missing)

    def _leave(self) -> None:
        """Post this rank's goodbye when told to. A thread that waits from the start on does so, because Python 3.12
        starts none at exit, and any thread that asks the store may be stuck there."""
        self._leaving.wait()
        self.peers.leave()

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._leaving.set()
            self._threads["leaves"].join(ANSWER_S)

    def stop(self) -> None:
        """Post that this rank leaves, and end the threads; not if another rank is gone, as later calls may hang."""
        self.leave()
        if self._gone is None:
            self._stop.set()
            for thread in self._threads.values():
                thread.join(ANSWER_S)


class _Standstill:
    """Measures how long ``thread`` (an id) has stood in the same call while nothing else has changed."""

    def __init__(self, thread: int, running_s: RunningTime) -> None:
        self._thread, self._running_s = thread, running_s
        self._seen: Hashable = None
        self._since = running_s()

    def seconds(self, state: Hashable) -> float:
        """Return the seconds since the thread or ``state`` last changed. ``state`` shows progress in other threads."""
        frame = sys._current_frames().get(self._thread)
        stack = []
        while frame is not None:
            # The id, because a kept frame would keep its local variables and so tensors.
            stack.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        seen = (tuple(stack), state)
        now = self._running_s()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


_LIVE: WeakSet[Watchdog] = WeakSet()
_registered_in: int | None = None


def _say_goodbye_at_the_end() -> None:
    """Make :func:`_say_goodbye` run at exit, also in processes of multiprocessing, which skip atexit."""
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        atexit.register(_say_goodbye)
        Finalize(None, _say_goodbye, exitpriority=100)


def _say_goodbye() -> None:
    """Post that this process ends cleanly, else neighbours would think that it was killed; and end the threads. Python
    ends a thread that is inside the store when the interpreter goes, and C++ then aborts the process."""
    if not hasattr(sys, "last_value"):  # set by an exception that ends the process
        for watchdog in list(_LIVE):
            watchdog.stop()
