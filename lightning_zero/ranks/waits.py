"""Waiting for other ranks with a bound, and saying for whom.

::

    wait_work            the others come within zero.stall_timeout_s, or StallError names ranks and places; in seconds
                         where ranks wait for each other, for messages of which no one comes to all;
                         where a connection breaks, PeerError names the rank that is gone
    ... patient=True     as long as any rank is at work (one that downloads, others in a barrier): only when all wait,
                         for things that differ, nothing will ever come
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from lightning_zero.ranks.peers import PeerError, is_broken_connection
from lightning_zero.ranks.watchdog import Watchdog, connection_of_its_own

GO_ON_S = 0.001  # between two looks at what goes on during a wait
ASK_S = 5.0  # of a wait, until the other ranks' waits are looked at; then twice as long, and so on


class StallError(RuntimeError):
    """This rank waited for others longer than ``zero.stall_timeout_s``; the message names ranks and places."""


class GoesOn(Protocol):
    """What this rank has to send by and by, and another rank may need before it comes to where this one waits."""

    def go_on(self) -> bool:
        """Send what can be sent by now, without waiting and without raising; returns whether something is left."""
        ...


_going_on: weakref.WeakSet[Any] = weakref.WeakSet()


def goes_on_in_waits(what: GoesOn) -> None:
    """Have ``what`` go on while this process waits for other ranks, as long as it lives."""
    _going_on.add(what)


class _Wait(NamedTuple):
    number: int
    label: str
    work: Any


class _Elsewhere:
    """Stands for the message of a call of somebody else's, until it returns."""

    def is_completed(self) -> bool:
        return False


# The last wait. Another thread reads it, so it is replaced as a whole: changed field by field, the thread could pair
# the label of one wait with the work of another.
_wait_of_process = _Wait(0, "", None)


class Waits:
    """Waits for the other ranks of a group. It knows where this rank is, what it waits for, and who is gone.

    Attributes:
        rank, world_size: in the group.
        place: what this rank is doing, in words; posted for the others' error messages.
        issued: operations asked for so far; a number that grows shows that this rank is not stuck.
        waited_s: seconds that the host has spent waiting for messages.
        asked: messages that this rank has sent, or waited for, by their names.
    """

    def __init__(self, group: Any, *, stall_timeout_s: float) -> None:
        """
        Args:
            group: None for one rank.
        """
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.stall_timeout_s = stall_timeout_s
        self.place = "starting"
        self.issued = 0
        self.waited_s = 0.0
        self.asked: Counter[str] = Counter()
        self.all_take_part = True  # in every message; else counts do not say who waits for whom
        self._noted: set[str] = set()
        self._watchdog: Watchdog | None = None

    def watch(self, number: int, *, hears_ends: bool) -> None:
        """Start to tell the other ranks where this one is, and to listen to them.

        Args:
            number: the same on all ranks, and used once.
            hears_ends: the backend hears of broken connections by itself.
        """
        store = connection_of_its_own(dist.distributed_c10d._get_default_store())
        self._watchdog = Watchdog(self, store, number=number, hears_ends=hears_ends)

    def note(self, label: str) -> None:
        """A message of this name is sent; the host may wait for it later, or never."""
        self._noted.add(label)
        self.asked[label] += 1

    def count_anew(self) -> None:
        """Count messages from here on. On all ranks, when they go on after an exception: some may have sent more."""
        self.asked.clear()

    @property
    def waiting(self) -> str:
        """The name of the wait that this process is in; empty where it is at work. Another thread reads it."""
        number, label, work = _wait_of_process
        return "" if work is None or work.is_completed() else f"{number}: {label}"

    def close(self) -> None:
        """End the threads."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait_work(self, work: Any, label: str, *, patient: bool = False, agrees: bool = True) -> None:
        """Wait for a message; on the host no longer than ``stall_timeout_s``.

        Args:
            patient: another rank may be at work for long; see above.
            agrees: it is an agreement of ranks that may be at different places, and have to send more before they come.

        Raises:
            StallError: the others did not come; names this rank's place and theirs.
            PeerError: the connection broke; names the rank that is gone.
        """
        global _wait_of_process
        started = time.monotonic()
        if label not in self._noted:  # then it is waited for as soon as it is sent
            self.asked[label] += 1
        try:
            if work.is_completed():
                work.wait()  # not left out: a message that has failed is complete too, and raises its error here
                return
            _wait_of_process = _Wait(_wait_of_process.number + 1, label, work)
            try:
                if agrees:
                    self._go_on(work)
                self._wait(work, label, patient=patient)
            finally:
                # A work holds its tensors: it would keep a bucket's memory until the next wait.
                _wait_of_process = _wait_of_process._replace(work=None)
            self.waited_s += time.monotonic() - started
        except RuntimeError as error:
            waited = time.monotonic() - started
            if isinstance(error, StallError):
                raise
            if is_broken_connection(error):
                raise PeerError(
                    f"rank {self.rank}: {self._culprit()}; noticed during {label!r} ({self.place}): {error}"
                ) from error
            if waited < 0.9 * self.stall_timeout_s:
                raise RuntimeError(f"rank {self.rank}: {label!r} failed ({self.place}): {error}") from error
            raise StallError(self._stall_message(label, waited)) from error

    @contextlib.contextmanager
    def elsewhere(self, label: str) -> Iterator[None]:
        """Inside, this rank waits for all others in a call of somebody else's; they hear of it. It is not bounded."""
        global _wait_of_process
        self._go_on(_Elsewhere())  # all of it: nothing can be sent from inside
        self.asked[label] += 1
        _wait_of_process = _Wait(_wait_of_process.number + 1, label, _Elsewhere())
        try:
            yield
        finally:
            _wait_of_process = _wait_of_process._replace(work=None)

    def _go_on(self, work: Any) -> None:
        """Send what goes on while ``work`` is waited for. Another rank may look at a parameter before it comes, or wait
        for its device: for gathers that are this rank's, too."""
        if threading.current_thread() is not threading.main_thread():
            return
        deadline = time.monotonic() + self.stall_timeout_s
        while sum(each.go_on() for each in list(_going_on)) and time.monotonic() < deadline:  # all of them
            if work.is_completed():
                return
            time.sleep(GO_ON_S)

    def _wait(self, work: Any, label: str, *, patient: bool) -> None:
        deadline, ask_s = time.monotonic() + self.stall_timeout_s, ASK_S
        said = False
        while True:
            # Only the wait ends after ``limit``. The message goes on, since its group has a longer timeout
            # (``comm/groups.py``), so it may be waited for again.
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
                    self._refuse_waiting_for_each_other(label)
                    continue
                # A message that has failed raises its error at each wait: no patience helps.
                if not timed_out or not patient or self._watchdog is None:
                    raise
                if self._watchdog.all_wait() and not work.is_completed():
                    raise
            if not said:
                said = True
                print(self._stall_message(label, self.stall_timeout_s), file=sys.stderr, flush=True)

    def _refuse_waiting_for_each_other(self, label: str) -> None:
        assert self._watchdog is not None
        waits = self._watchdog.waits_for_each_other()
        if waits is None:
            return
        places = self._watchdog.places()
        lines = "\n".join(f"  rank {r}: {place}, waits for {waits[r]!r}" for r, place in enumerate(places))
        raise StallError(
            f"rank {self.rank} waits for {label!r}, and some rank waits for something else, so that nobody will come:\n"
            f"{lines}\nAll ranks must call this, or none: gather(), the module, saves, state_dicts, norms and reads of "
            "parameters take all ranks. Look for a call that only some ranks make (under `if rank == 0`, in a callback "
            "that works on rank 0). If ranks take different paths through the model, set zero.dynamic_graph=true."
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
        return (
            f"rank {self.rank} waited {waited:.0f} s for {label!r} and the other ranks did not come.\n{lines}\n"
            "If ranks take different paths through the model, set zero.dynamic_graph=true; if a rank is only slow, "
            "raise "
            f"zero.stall_timeout_s (now {self.stall_timeout_s:g})."
        )

    def _culprit(self) -> str:
        return self._watchdog.culprit() if self._watchdog is not None else "a peer broke off"

    # -- errors -----------------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> None:
        """Explain the exception that ends this rank.

        Where it comes from the end of another rank, the error gets a note that names that rank. An error of this rank's
        own is told to the others.
        """
        if self._watchdog is None or isinstance(error, PeerError | StallError) or not isinstance(error, Exception):
            return
        if is_broken_connection(error):
            error.add_note(f"rank {self.rank}: {self._culprit()}")
        elif isinstance(error, RuntimeError) and "timed out" in str(error).lower():  # in a collective of others
            error.add_note(self._stall_message(str(error).splitlines()[0], self.stall_timeout_s))
        else:
            self._watchdog.tell(error)

    def forget_failures(self) -> None:
        """Forget which rank ended an earlier run. All ranks call it at the start of a run."""
        if self._watchdog is not None:
            self._watchdog.peers.forget()

    def silent(self) -> list[int]:
        """The ranks that have ended or hang, this one apart. It takes a few seconds."""
        found = self._watchdog.places_and_silent() if self._watchdog is not None else None
        return found[1] if found is not None else [rank for rank in range(self.world_size) if rank != self.rank]

    def missing_here(self, timeout_s: float) -> list[int]:
        """The ranks that do not call this too, after the same number of operations, within ``timeout_s``.

        It goes through the store and so works where ranks are at different places and a collective would hang.
        """
        return [] if self._watchdog is None else self._watchdog.missing(f"after {self.issued}", timeout_s)
