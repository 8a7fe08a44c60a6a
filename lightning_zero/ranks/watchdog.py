"""Runs threads beside training: they post what this rank is doing, and end a process that waits for a dead rank.

See [Note: what a rank does when another dies].
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from multiprocessing.util import Finalize
from typing import Any, Protocol, TypeVar
from weakref import WeakSet, finalize, ref

from lightning_zero.ranks.posts import RunningTime
from lightning_zero.ranks.verdict import DYING_S, STILL_S, Gone, Peers, Stuck, verdict

EVERY_S = 2.0  # seconds between posts
RANKS_AT_THIS_PACE = 512  # more ranks post less often, because all use one store
ASKING = 32  # number of ranks that check whether all wait for each other; each reads what all have posted
STANDSTILL_S = 10.0  # seconds for launchers to act and exceptions to arrive, after a rank has ended
EXIT_CODE = 1
ANSWER_S = 5.0  # seconds that a store may take to answer

T = TypeVar("T")


_CONNECTIONS: list[tuple[Any, Any]] = []


def connection_of_its_own(store: Any) -> Any:
    """Return a second connection to ``store``, for threads. Opened once, because looking up host names can be slow."""
    if not _CONNECTIONS or _CONNECTIONS[0][0] is not store:
        _CONNECTIONS[:] = [(store, store.clone() if hasattr(store, "clone") else store)]
    return _CONNECTIONS[0][1]


def within(seconds: float, ask: Callable[[], T], default: T) -> T:
    """Call ``ask`` in a thread and return its result. Return ``default`` if ``ask`` raises (the store is gone) or takes
    longer than ``seconds`` (behind a cut network a store neither answers nor fails), or if no thread can be started
    (some versions of Python start none once the interpreter is ending)."""
    found = [default]

    def answer() -> None:
        with contextlib.suppress(Exception):
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
    """Posts what this rank is doing, watches other ranks, and ends this process if it is stuck and a rank is dead.

    Args:
        watched: this rank's :class:`Waits`, held by a weak reference. The threads end when it is garbage-collected.
        store: a connection on which no call blocks for long.
        number: a part of this watchdog's store keys; equal on all ranks, and used only once.
        notices_broken_connections: whether the backend itself notices broken connections.
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
        self._watched = ref(watched)
        self._rank, self._world_size = watched.rank, watched.world_size
        self._limit_s = watched.stall_timeout_s
        self._notices_broken_connections, self._end = notices_broken_connections, end
        self._meetings = 0
        self._left = False
        self.at_end: list[Callable[[], object]] = []  # called by :meth:`stop`: they end other threads
        self._leaving = threading.Event()
        self._store = store
        self._every_s = EVERY_S * max(1.0, self._world_size / RANKS_AT_THIS_PACE)
        self.running_s = RunningTime(max(3 * self._every_s, 1.0))
        prefix = f"lightning_zero/{number}"
        self.peers = Peers(store, prefix, self._rank, self._world_size, self._every_s, self.running_s)
        # Longer than the engine's own errors take, because those say more.
        self._patience_s = 1.2 * self._limit_s + 2 * self.peers.roll_call_s
        # Who is gone, how long this process may stand still, and until when it may in any case.
        self._gone: tuple[str, float, float] | None = None
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
        """Return the newest watchdog of a world of ``world_size`` ranks that has not said goodbye, or None."""
        found = [dog for dog in _LIVE if dog._world_size == world_size and not dog._left]
        return max(found, key=lambda dog: dog._number, default=None)

    def _run(self) -> None:
        posts = self.peers.posts
        while not self._stop.wait(self._every_s if posts.holder.beat else 0.1):
            watched = self._watched()
            if watched is None and self._gone is None:
                break
            try:
                if watched is not None:
                    posts.write(watched.place, watched.waiting, watched.asked)
                else:
                    posts.write(posts.own.place)
                self._listen()
            except Exception:  # the store is gone
                if not posts.holder.left:
                    quick = not self._notices_broken_connections and self._holder_ends()
                    self._note(self.peers.without_store(), STANDSTILL_S if quick else self._patience_s)
                return
            self._heard_s = self.running_s()
            watched = None  # else it would live through the next wait
        if self._watched() is None:
            self.leave()  # garbage instead of closed: other ranks may keep their watchdogs

    def _holder_ends(self) -> bool:
        """Wait up to a second for rank 0's process, which holds the store, to end; return whether it has."""
        posts, deadline = self.peers.posts, time.monotonic() + DYING_S
        while not posts.has_ended(posts.holder):
            if time.monotonic() > deadline or self._stop.wait(0.05):
                return False
        return True

    def _judge(self) -> None:
        """End this process when it is stuck. Runs on its own thread, because :meth:`_run` may wait for the store."""
        while not self._stop.wait(self._every_s):
            watched = self._watched()
            if watched is None and self._gone is None:
                return
            if self.running_s() - self._heard_s > self._limit_s and not self.peers.posts.holder.left:
                self._note(self.peers.without_store(), self._patience_s)
            self._end_if_stuck(watched)
            watched = None  # else it would live through the next wait

    def _listen(self) -> None:
        """Check whether a rank is gone, by the posts of both neighbouring ranks and what other ranks have reported."""
        beside = {(self._rank + step) % self._world_size for step in (1, -1)} - {self._rank}
        seen = self.peers.posts.read({0, *beside})
        seen = {rank: one for rank, one in seen.items() if rank in beside and not one.post.left}
        found = self.peers.find_posted()
        if self._notices_broken_connections:  # the engine's own error comes
            seen, found = {rank: one._replace(has_ended=False) for rank, one in seen.items()}, False
        gone = verdict(seen, silent_s=self._limit_s)
        if isinstance(gone, Gone) and gone.have_ended and not found:
            found = bool(self.peers.tell_gone(gone.sentence(seen)))
        if found and self.peers.known is not None:
            self._note(self.peers.known, min(STANDSTILL_S, self._limit_s))
        elif isinstance(gone, Gone):
            self._note(self.peers.known or gone.sentence(seen, self._limit_s), self._patience_s)
        else:
            self._gone = None  # the rank was only slow

    def _note(self, who: str, limit_s: float) -> None:
        if self._left and self._gone is None:
            return  # this rank has said goodbye: all end, in any order
        if self._gone is None:
            watched = self._watched()
            place = f"; this rank is at: {watched.place}" if watched is not None else ""
            print(f"rank {self._rank}: {who}{place}", file=sys.stderr, flush=True)
        if self._gone is None or limit_s < self._gone[1]:
            # Launchers and exceptions get their time, though this rank may have stood still before.
            self._gone = who, limit_s, self.running_s() + min(limit_s, STANDSTILL_S)

    def _end_if_stuck(self, watched: Watched | None) -> None:
        state = (watched.place, watched.issued) if watched is not None else None
        still_s = self._trains.seconds(state)
        # A process that a person types into stands still while the person thinks.
        typed_into = hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "__IPYTHON__")
        if self._gone is None or typed_into:
            return
        who, limit_s, earliest = self._gone
        if still_s < limit_s or self.running_s() < earliest:
            return
        with contextlib.suppress(Exception):
            place = f" (at: {watched.place})" if watched is not None else ""
            print(
                f"rank {self._rank}{place} ends: it has made no progress for {still_s:.0f} s, and {who}",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
        within(ANSWER_S, lambda: self.peers.tell_gone(who), None)
        # An exception would end this thread alone, and no exit handler runs while training is inside a backend.
        self._end(EXIT_CODE)

    def paused_s(self) -> float:
        """Return for how many seconds this process has been paused since this watchdog was created."""
        if self._threads["judges"].is_alive():  # else nobody has called, which would count as a pause
            self.running_s()
        return self.running_s.paused_s

    def places_and_silent(self) -> tuple[list[str], list[int]] | None:
        """Return what every rank is doing, and which ranks are silent; ``None`` if the store is gone. Takes seconds."""

        def ask() -> tuple[list[str], list[int]]:
            seen, gone = self.peers.call_roll()
            watched = self._watched()
            own = watched.place if watched is not None else self.peers.posts.own.place
            places = [seen[rank].post.place if rank in seen else own for rank in range(self._world_size)]
            return places, gone.ranks if gone is not None else []

        return within(2 * self.peers.roll_call_s + ANSWER_S, ask, None)

    def culprit(self) -> str:
        """Return a sentence about the rank that has ended, after a connection has broken. Takes some seconds."""
        return within(2 * self.peers.roll_call_s + ANSWER_S, self.peers.culprit, self.peers.without_store())

    def tell(self, error: BaseException) -> None:
        within(ANSWER_S, lambda: self.peers.tell(error), None)

    def compare_waits(self, *, at_limit: bool = False) -> Gone | Stuck | None:
        """Return a verdict on the waits of all ranks. Takes some seconds. ``at_limit``: whether this rank's wait has
        reached its time limit. If so, all ranks count as stuck if the store does not answer."""
        asks = at_limit or self._rank % (1 + self._world_size // ASKING) == 0  # other ranks read what these have found
        watched = self._watched()
        wait = watched.waiting if watched is not None else ""
        silence: Gone | Stuck | None = Stuck([], [], False) if at_limit else None
        limit_s = 2 * self._every_s + STILL_S + ANSWER_S
        return within(limit_s, lambda: self.peers.compare_waits(wait, self._limit_s, asks), silence)

    def missing(self, place: str, timeout_s: float) -> list[int]:
        """Post that this rank is at ``place``. Return the other ranks that do not post this within ``timeout_s``."""
        self._meetings += 1  # so that posts of earlier meetings do not count
        key = f"lightning_zero/{self._number}/meeting {self._meetings} {place}"
        missing = [rank for rank in range(self._world_size) if rank != self._rank]
        deadline = time.monotonic() + timeout_s

        def meet() -> None:
            self._store.set(f"{key}/{self._rank}", "")
            while missing and time.monotonic() < deadline:
                missing[:] = [rank for rank in missing if not self._store.check([f"{key}/{rank}"])]
                time.sleep(0.02)

        within(timeout_s + ANSWER_S, meet, None)
        return list(missing)

    def _leave(self) -> None:
        """Wait for a call of :meth:`leave`, then post this rank's goodbye. This thread runs from the start, because
        Python 3.12 starts no thread at exit, and any other thread that uses the store may hang there."""
        self._leaving.wait()
        self.peers.leave()

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._leaving.set()
            self._threads["leaves"].join(ANSWER_S)

    def stop(self) -> None:
        """Post that this rank leaves, and end the threads. If another rank is gone, keep the threads: they end this
        process if a later call hangs."""
        self.leave()
        for end in self.at_end:
            end()
        if self._gone is None:
            self._stop.set()
            for thread in self._threads.values():
                thread.join(ANSWER_S)


class _Standstill:
    """Measures for how long ``thread`` (an id) has been at the same instruction while nothing else has changed."""

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
    """Unless an exception is ending this process, post that it ends normally, and stop the watchdogs' threads, because
    C++ aborts the process if a thread is still inside a call of the store when Python exits."""
    error = sys.exc_info()[1]  # in a process of multiprocessing, which still handles what ends it
    fails = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
    if not fails and not hasattr(sys, "last_value"):  # set by an exception that ends the process
        for watchdog in list(_LIVE):
            watchdog.stop()
