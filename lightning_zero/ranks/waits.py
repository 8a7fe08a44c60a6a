"""Waits for other ranks with a time limit, and with errors that name ranks.

::

    wait_work            the other ranks arrive within zero.stall_timeout_s, else StallError names ranks and places;
                         within seconds if ranks wait for each other; PeerError names a rank whose connection broke
    ... patient=True     waits as long as any rank works (one downloads, others are in a barrier); raises when all
                         ranks wait for different things
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_zero.ranks.verdict import Gone, PeerError, StallError, is_broken_connection, plain
from lightning_zero.ranks.watchdog import Watchdog, connection_of_its_own

GO_ON_S = 0.001  # seconds between two calls of ``go_on`` during a wait
ASK_S = 5.0  # seconds of waiting, until the other ranks' waits are compared; doubles each time


_going_on: weakref.WeakSet[Any] = weakref.WeakSet()


def goes_on_in_waits(what: Any) -> None:
    """Call ``what.go_on()`` while this process waits for other ranks, until ``what`` is garbage-collected.

    ``go_on`` sends messages that another rank may need before it can join this rank's wait. It neither waits nor
    raises, and returns whether messages are left to send.
    """
    _going_on.add(what)


class _Wait(NamedTuple):
    number: int
    label: str
    work: Any


class _Elsewhere:
    """Takes the place of a message while a call outside of the engine waits for other ranks. Never completes."""

    def is_completed(self) -> bool:
        return False


# Replaced as a whole, because another thread reads it and must not mix the fields of two waits.
_wait_of_process = _Wait(0, "", None)


class Waits:
    """Waits for the other ranks of a group, and knows what this rank is doing and waiting for."""

    def __init__(self, group: Any, *, stall_timeout_s: float) -> None:
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.stall_timeout_s = stall_timeout_s
        self.place = "starting"  # what this rank is doing, in words, for other ranks' error messages
        self.issued = 0  # operations asked for so far; while it grows this rank is not stuck
        self.asked: Counter[str] = Counter()  # messages that this rank has sent or waited for, by name
        self.all_take_part = True  # all ranks take part in every message; else counts do not show who waits for whom
        self.number = 0  # a part of store keys: the same on all ranks, and used only once
        self._watchdog = Watchdog.latest(self.world_size)  # that of an earlier run or engine, until watch()

    def watch(self, number: int, *, notices_broken_connections: bool) -> None:
        """Start the watchdog, which posts what this rank is doing and listens to the other ranks. Collective.

        Args:
            number: see :attr:`number`.
            notices_broken_connections: whether the backend itself notices broken connections.
        """
        store, self.number = connection_of_its_own(dist.distributed_c10d._get_default_store()), number
        self._watchdog = Watchdog(self, store, number=number, notices_broken_connections=notices_broken_connections)

    @property
    def waiting(self) -> str:
        """Return index and label of the wait that this process is in; "" if there is none. Other threads call this."""
        number, label, work = _wait_of_process
        return "" if work is None or work.is_completed() else f"{number}: {label}"

    def call_at_end(self, stop: Callable[[], object]) -> None:
        """Call ``stop``, which ends a thread that uses the store, before the process ends normally."""
        if self._watchdog is not None:
            self._watchdog.at_end.append(stop)

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait_work(self, work: Any, label: str, *, patient: bool = False, agrees: bool = True) -> None:
        """Wait for the message ``work``, for at most ``stall_timeout_s`` if it is a host message. If ranks do not join,
        raise a StallError that says what each rank does. If a connection breaks, raise a PeerError that names a rank.

        Args:
            patient: wait longer while any rank works; see the module's docstring.
            agrees: whether the message is an agreement. While waiting for one, this rank sends pending messages that
                others may need. Other messages were counted in :attr:`asked` by the caller, when they were sent.
        """
        global _wait_of_process
        started = time.monotonic()
        if agrees:  # others were counted when they were sent
            self.asked[label] += 1
        try:
            if work.is_completed():
                work.wait()  # a failed message is complete too; this raises its error
                return
            _wait_of_process = _Wait(_wait_of_process.number + 1, label, work)
            try:
                if agrees:
                    self._go_on(work)
                self._wait(work, label, patient=patient)
            finally:
                # Drop the work: it holds its tensors, and would keep a bucket's memory until the next wait.
                _wait_of_process = _wait_of_process._replace(work=None)
        except RuntimeError as error:
            waited = time.monotonic() - started
            if isinstance(error, PeerError | StallError):
                raise
            if is_broken_connection(error):
                raise PeerError(
                    f"rank {self.rank}: {self._culprit()}; noticed during {label!r} ({self.place}): {plain(error)}"
                ) from None
            if waited < 0.9 * self.stall_timeout_s:
                raise RuntimeError(f"rank {self.rank}: {label!r} failed ({self.place}): {error}") from error
            raise StallError(self._stall_message(label, waited)) from error

    def comes(self, work: Any, label: str, seconds: float) -> bool:
        """Wait for the message ``work`` for at most ``seconds``, and return whether it has come. The other ranks need
        not join: for them this rank does not count as waiting."""
        started = time.monotonic()
        self._go_on(work)
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if time.monotonic() - started < seconds or work.is_completed():
                self.wait_work(work, label)  # it came just now, or its connection is broken
                return True
            return False
        return True

    @contextlib.contextmanager
    def elsewhere(self, label: str) -> Iterator[None]:
        """Context manager that marks its body as a wait for all ranks, outside of the engine and without time limit."""
        global _wait_of_process
        self._go_on(_Elsewhere())  # send everything, because nothing can be sent from inside
        self.asked[label] += 1
        _wait_of_process = _Wait(_wait_of_process.number + 1, label, _Elsewhere())
        try:
            yield
        finally:
            _wait_of_process = _wait_of_process._replace(work=None)

    def _go_on(self, work: Any) -> None:
        """Send pending messages while waiting for ``work``: another rank may need them before it joins that work."""
        if threading.current_thread() is not threading.main_thread():
            return
        deadline = time.monotonic() + self.stall_timeout_s
        while sum(each.go_on() for each in list(_going_on)) and time.monotonic() < deadline:  # call all
            if work.is_completed():
                return
            time.sleep(GO_ON_S)

    def _wait(self, work: Any, label: str, *, patient: bool) -> None:
        deadline, ask_s = time.monotonic() + self.stall_timeout_s, ASK_S
        paused_s = self._watchdog.running_s.paused_s if self._watchdog is not None else 0.0
        said = False
        while True:
            # ``limit`` ends only the wait. The message can be waited for again, because its group has a longer timeout.
            left = deadline - time.monotonic()
            asks = left > ask_s + 1 and self._watchdog is not None and self.all_take_part
            limit = ask_s if asks else self.stall_timeout_s if said else max(left, 0.01)
            began = time.monotonic()
            try:
                work.wait(timedelta(seconds=limit))
                return
            except RuntimeError:
                timed_out = time.monotonic() - began > 0.9 * limit
                if asks and timed_out:
                    ask_s *= 2
                    self._raise_if_nobody_comes(work, label)
                    continue
                if timed_out and self._watchdog is not None and (now_s := self._watchdog.paused_s()) > paused_s:
                    deadline, paused_s = deadline + now_s - paused_s, now_s
                    continue
                # A failed message raises its error at each wait, so patience does not help.
                if not timed_out or not patient or self._watchdog is None:
                    raise
                if self._watchdog.compare_waits(at_limit=True) is not None and not work.is_completed():
                    raise
            if not said:
                said = True
                print(self._stall_message(label, self.stall_timeout_s), file=sys.stderr, flush=True)

    def _raise_if_nobody_comes(self, work: Any, label: str) -> None:
        assert self._watchdog is not None
        found = self._watchdog.compare_waits()
        if found is None or work.is_completed():
            return
        if isinstance(found, Gone):
            raise PeerError(f"rank {self.rank}: {self._culprit()}; noticed during {label!r} ({self.place})")
        if not found.nobody_comes:
            return
        waits = zip(found.places, found.labels, strict=True)
        lines = "\n".join(f"  rank {r}: {place}, waits for {wait!r}" for r, (place, wait) in enumerate(waits))
        raise StallError(
            f"rank {self.rank} waits for {label!r}, and some rank waits for something else, so neither can continue:\n"
            f"{lines}\nAll ranks must call this, or none: gather(), saves, norms, writes to parameters and reads of "
            "gradients take all ranks, and so do uses of parameters between a backward and its step. Look for a call "
            "that only some ranks make (under `if rank == 0`, in a callback that works on rank 0). If ranks take "
            "different paths through the model, set zero.dynamic_graph=true."
        )

    def _stall_message(self, label: str, waited: float) -> str:
        asked = self._watchdog.places_and_silent() if self._watchdog is not None else None
        if asked is None:
            lines = f"  rank {self.rank}: {self.place}"
            if self._watchdog is not None:
                lines += f"\n  {self._watchdog.peers.without_store()}, or the network to it is cut"
        else:
            lines = "\n".join(
                f"  rank {r}: {place}{' (does not answer: it has ended or hangs)' if r in asked[1] else ''}"
                for r, place in enumerate(asked[0])
            )
        if self._watchdog is not None and self._watchdog.peers.known is not None:
            lines += f"\n{self._watchdog.peers.known}"
        return (
            f"rank {self.rank} waited {waited:.0f} s for {label!r} and the other ranks did not come.\n{lines}\n"
            "If only some ranks make this call (under `if rank == 0`, in a callback that works on rank 0), make it on "
            "all. If ranks take different paths through the model, set zero.dynamic_graph=true; if a rank is only "
            f"slow, raise zero.stall_timeout_s (now {self.stall_timeout_s:g})."
        )

    def _culprit(self) -> str:
        return self._watchdog.culprit() if self._watchdog is not None else "a peer broke off"

    # -- errors -----------------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> None:
        """Handle ``error``, which ends this rank: add a note on the rank that caused it, or post it for other ranks."""
        if isinstance(error, PeerError):
            error.__traceback__ = None  # the cause is on another rank, and a hundred lines would hide its name
        if self._watchdog is None or isinstance(error, PeerError | SystemExit):
            return
        if isinstance(error, StallError):
            return self._watchdog.tell(error)
        if is_broken_connection(error):
            error.add_note(f"rank {self.rank}: {self._culprit()}")
        elif isinstance(error, RuntimeError) and "timed out" in str(error).lower():
            error.add_note(self._stall_message(plain(error).splitlines()[0], self.stall_timeout_s))
        else:
            self._watchdog.tell(error)

    def forget_failures(self) -> None:
        """Forget which ranks failed in an earlier run. Call this when the next run of an engine starts. Collective."""
        if self._watchdog is not None:
            self._watchdog.peers.forget()

    def silent(self) -> list[int]:
        """Return the other ranks that have ended or hang; all others if the store is gone. Takes a few seconds."""
        found = self._watchdog.places_and_silent() if self._watchdog is not None else None
        return found[1] if found is not None else [rank for rank in range(self.world_size) if rank != self.rank]

    def missing_here(self, timeout_s: float) -> list[int]:
        """Return the other ranks that do not call this method within ``timeout_s`` seconds after as many operations as
        this rank. Works where a collective would hang, because it uses the store."""
        return [] if self._watchdog is None else self._watchdog.missing(f"after {self.issued}", timeout_s)
