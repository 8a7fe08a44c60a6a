"""Find out over the store which rank is gone when a connection breaks. The first rank that notices asks who died and
writes the name into the store, because later ranks may only see the first one leave::

    rank 3   killed
    rank 1   broken connection   who is it?  roll call ............ 3 does not answer   writes: rank 3
    rank 0                                   answers (its thread)                        reads it, raises
    rank 2                                   answers, breaks too    waits for the name   reads it, raises

On one machine the system knows which processes live. A rank that fails with an exception writes its own name. See
[Note: what a rank does when another dies].
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROLL_CALL_S = 10.0  # a rank that is only busy must have time to answer
DYING_S = 1.0  # time between the end of a process's connections and its own end
_LASTING = ("who/", "left/")  # keys that stay valid after an exception that all ranks survive
_BROKEN = re.compile(
    r"connection (was )?(closed|reset|refused|timed out)|closed by peer|broken pipe|socket (is )?closed"
    r"|(read|write|recv|send)\w* (error|failed)|remote process exited|no route to host|network is unreachable",
    re.IGNORECASE,
)


class PeerError(RuntimeError):
    """Raised when another rank has ended. The message names that rank."""


def is_broken_connection(error: BaseException) -> bool:
    """Return whether ``error`` is a backend's report that the connection to another rank is broken."""
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


def plain(error: BaseException) -> str:
    """Return what a backend says in ``error``, without its places in C++ and its wishes."""
    return re.sub(r"^\[[^\]]*:\d+\] |\. This is typically.*|[\s.]*GLHF!.*", "", str(error), flags=re.DOTALL)


def machine() -> str:
    """Return a name of this machine and its process-id namespace. Process ids compare only under equal names."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return boot or socket.gethostname()


def is_alive(pid: int) -> bool:
    """Return whether the process ``pid`` of this machine lives (a zombie does not). True if there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return not Path("/proc/self/stat").exists()  # no /proc: assume that the process lives
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class RunningTime:
    """Counts the seconds in which this process runs. A job that a scheduler suspends, or a process that a debugger
    holds, must not find other ranks late when it goes on.

    A thread calls this object every few seconds. A time of more than ``pause_s`` seconds between two calls was a pause.

    Attributes:
        paused_s: the seconds of all pauses until the last call.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s, self.paused_s = pause_s, 0.0
        self._last = time.monotonic(), 0.0  # the last call, and ``paused_s`` then

    def __call__(self) -> float:
        last, pauses = self._last
        now = time.monotonic()
        if now - last > self._pause_s:
            pauses += now - last
        self._last = now, pauses  # as a whole: other threads call too
        self.paused_s = pauses
        return now - pauses


@dataclass(frozen=True, slots=True)
class _Who:
    host: str
    pid: int
    machine: str

    def __str__(self) -> str:
        return f"on {self.host}, process {self.pid}"


class Peers:
    """Tells through the store which ranks of a group are gone. ``store``: a connection on which no call blocks long.
    ``every_s``: seconds from one call of :meth:`answer` to the next, on each rank."""

    def __init__(
        self, store: Any, prefix: str, rank: int, world_size: int, every_s: float, running_s: RunningTime
    ) -> None:
        self._store, self._prefix, self._every_s, self._running_s = store, prefix, every_s, running_s
        self._rank, self._world_size = rank, world_size
        self._own = _Who(socket.gethostname(), os.getpid(), machine())
        self._holder: _Who | None = None
        self._neighbours: dict[int, _Who] = {}
        self.known: str | None = None  # a sentence about the rank that ended first
        self._round = 0
        self._beats = 0
        self._heard: tuple[str | None, float] = (None, running_s())  # the next beat, when it came
        self._told = False
        self.holder_left = False  # rank 0 has said goodbye
        store.set(f"{prefix}/who/{rank}", json.dumps(asdict(self._own)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if name.startswith(_LASTING) else f"{self._prefix}/{self._round}/{name}"

    @property
    def roll_call_s(self) -> float:
        return max(ROLL_CALL_S, 3 * self._every_s)

    @property
    def knows_holder(self) -> bool:
        """Return whether this rank knows rank 0's host and process, to name them after rank 0's store is gone."""
        return self._holder is not None

    @property
    def holder_is_dead(self) -> bool:
        """Return whether rank 0 ran on this machine and is known to have ended."""
        holder = self._holder
        return holder is not None and holder.machine == self._own.machine and not is_alive(holder.pid)

    def forget(self) -> None:
        """Forget which ranks were gone, and use new store keys, when all ranks go on after an exception. Collective."""
        self._round, self.known, self._told = self._round + 1, None, False

    def _read(self, name: str) -> str | None:
        return self._store.get(self._key(name)).decode() if self._store.check([self._key(name)]) else None

    def _who(self, rank: int) -> _Who | None:
        text = self._read(f"who/{rank}")
        return _Who(**json.loads(text)) if text else None

    def _named(self, rank: int) -> str:
        who = self._who(rank)
        return f"rank {rank} ({who})" if who is not None else f"rank {rank}"

    def answer(self) -> None:
        """Answer another rank's roll call, and read which rank has ended. A thread calls this every few seconds."""
        if self._holder is None:
            self._holder = self._who(0)
        if self._store.check([self._key("roll")]):
            self._store.set(self._key(f"here/{self._rank}"), "")
        self.known = self.known or self._read("culprit")

    def leave(self) -> None:
        """Post this rank's goodbye: it ends normally. Do nothing after :meth:`tell`."""
        if not self._told:
            with contextlib.suppress(Exception):  # the store is gone
                self._store.set(self._key(f"left/{self._rank}"), "")

    def ended_neighbour(self) -> str | None:
        """Return a sentence about a rank whose process has ended, or None. Looks at this rank's neighbours on this
        machine and at other ranks' findings. A thread calls this under NCCL, which does not notice broken connections.
        """
        for rank in {(self._rank + step) % self._world_size for step in (1, -1)} - {self._rank}:
            who = self._neighbours.get(rank) or self._who(rank)
            if who is None:
                continue
            self._neighbours[rank] = who
            if who.machine == self._own.machine and not is_alive(who.pid):
                if self._store.check([self._key(f"left/{rank}")]):
                    continue
                told = self.known or self._read("culprit")
                found = told or f"rank {rank} ({who}) has ended without a word (killed?)"
                return self._store.compare_set(self._key("ended"), "", found).decode()
        return self._read("ended")

    def tell_end(self, who: str) -> None:
        """Post for other ranks that this process ends because of ``who``, a sentence about a rank that is gone."""
        with contextlib.suppress(Exception):
            self._store.compare_set(self._key("ended"), "", who)
            self._let_others_hear()

    def silent_neighbour(self, limit_s: float) -> str | None:
        """Post this rank's beat and read the next rank's. A thread calls this every few seconds. Return a sentence
        about the next rank if it has sent no beat for ``limit_s`` seconds; else None."""
        self.holder_left = self.holder_left or self._store.check([self._key("left/0")])
        self._beats += 1
        self._store.set(self._key(f"beat/{self._rank}"), str(self._beats))
        neighbour = (self._rank + 1) % self._world_size
        beat, now = self._read(f"beat/{neighbour}"), self._running_s()
        if beat is not None and beat != self._heard[0]:
            self._heard = beat, now
        if now - self._heard[1] < limit_s or self._store.check([self._key(f"left/{neighbour}")]):
            return None
        known = self.known or self._read("culprit") or self._read("ended")
        return known or f"{self._named(neighbour)} has not been heard of for {limit_s:g} s: it has ended or hangs"

    def tell(self, error: BaseException) -> None:
        """Post that this rank fails by its own ``error``, so that other ranks can say why this rank is gone."""
        self._told = True
        text = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0][:300]
        with contextlib.suppress(Exception):  # the store is gone
            self._write(f"rank {self._rank} ({self._own}) failed with {text}")

    def _write(self, culprit: str) -> str:
        """Post ``culprit``, a sentence about the rank that ended. Return the sentence that was posted first, which
        counts: a later rank may only have seen the end of a rank that noticed earlier."""
        self.known = self._store.compare_set(self._key("culprit"), "", culprit).decode()
        return self.known

    def culprit(self) -> str:
        """Find within seconds which rank has ended, after a broken connection. Return a sentence about it."""
        try:
            known = self.known or self._read("culprit")
            if known is not None:
                return known
            gone = self._dead_here() or self.silent()
            if not gone:
                return self._read("culprit") or "a peer broke off, though all ranks still answer"
            have = "has" if len(gone) == 1 else "have"
            found = f"{' and '.join(self._named(rank) for rank in gone)} {have} ended without a word (killed?)"
            if all(self._store.check([self._key(f"left/{rank}")]) for rank in gone):
                found = found.replace(
                    "ended without a word (killed?)", "come to the end of the program: all ranks must"
                )
                found += " make a call that takes all ranks (gather(), a save, a run), and here some have not"
            known = self._write(found)
            first = self._store.compare_set(self._key("speaker"), "", str(self._rank)).decode() == str(self._rank)
            if first:  # print now: a launcher may end this process before the exception is printed
                print(f"rank {self._rank}: {known}", file=sys.stderr, flush=True)
            self._let_others_hear()
            return known
        except Exception:  # the store is gone
            return self.known or self.without_store()

    def without_store(self) -> str:
        """Return a sentence about the rank (or torchrun's agent) that must have ended if the store is gone."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "a rank and torchrun's agent on the first node have ended"
        who = f" ({self._holder})" if self._holder is not None else ""
        return f"rank 0{who}, which holds the store, has ended"

    def _dead_here(self) -> list[int]:
        """Return the ranks of this machine whose processes have ended."""
        here = {r: w.pid for r in range(self._world_size) if (w := self._who(r)) and w.machine == self._own.machine}
        deadline = time.monotonic() + DYING_S
        while True:
            dead = [rank for rank, pid in here.items() if not is_alive(pid)]
            if dead or time.monotonic() > deadline:
                return dead
            time.sleep(0.05)

    def silent(self) -> list[int]:
        """Return the ranks that do not answer a roll call. The first caller holds it; others read its result."""
        caller = self._store.compare_set(self._key("roll"), "", str(self._rank)).decode()
        self._store.set(self._key(f"here/{self._rank}"), "")
        waiting = list(range(self._world_size))
        deadline = time.monotonic() + self.roll_call_s
        if caller != str(self._rank):
            # Wait twice as long, because the calling rank may be late on a busy machine.
            deadline += self.roll_call_s + 2 * self._every_s
            while (text := self._read("silent")) is None and time.monotonic() <= deadline:
                time.sleep(0.05)
            return [] if text is None else list(json.loads(text))
        while waiting and time.monotonic() < deadline:
            waiting = [r for r in waiting if not self._store.check([self._key(f"here/{r}")])]
            time.sleep(0.02)
        self._store.set(self._key("silent"), json.dumps(waiting))
        return waiting

    def _let_others_hear(self) -> None:
        """Wait a moment if the store ends with this process, so that other ranks can read what this rank has posted."""
        if self._rank == 0 and self._world_size > 2 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(1.25 * self._every_s)
