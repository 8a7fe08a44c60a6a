"""Judges from the ranks' posts whether a rank is gone, or all ranks wait for each other.

[Note: what a rank does when another dies]
Each rank posts what it does every few seconds (``posts.py``). :func:`verdict` is the one judgement of these posts: go
on, or some ranks are gone (PeerError), or all ranks are stuck (StallError). It is asked by

- a wait whose connection breaks (gloo), or that lasts: it raises PeerError or StallError (``waits.py``);
- a thread beside training, about the ranks before and after this one (``watchdog.py``). Outside of the engine's waits
  (for example in a metric's barrier or on a device) a backend waits for its own timeout unless it notices the death,
  which it never does under NCCL or when a network is cut. The thread prints the verdict, and ends this process if the
  process makes no further progress::

      a rank has ended on this machine without a goodbye   after a standstill of ten seconds (``STANDSTILL_S``). Not
                                                           under gloo, whose connections break
      no beat for zero.stall_timeout_s, or the store is    after a standstill that is longer than the engine's own
      gone or silent                                       errors take, because those say more

  No process is ended while its training thread progresses, or while a person types into it. A launcher may end the
  process sooner: Lightning's launcher looks every 5 s.

The first rank that acts on a verdict posts a sentence about it, which all others then use, because a later rank may
have seen only that the first rank left::

    rank 3   killed
    rank 1   broken connection   who is it?  roll call ............ 3 posts nothing      posts: rank 3
    rank 0                                   posts (its thread)                          reads it, raises
    rank 2                                   posts, breaks too      roll call            reads it, raises

A rank that fails by an exception of its own posts this, and others quote it. A rank that has raised saves only if all
have (``refuse_lonely_save`` in ``trainer/interruptions.py``), and does not wait for others at its exit (``Ended`` in
``trainer/processes.py``).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_zero.ranks.posts import Post, Posts, RunningTime, Seen

ROLL_CALL_S = 10.0  # a rank that is only busy must have time to post
DYING_S = 1.0  # time between the end of a process's connections and its own end
STILL_S = 1.0  # added to the time in which what ranks do is posted
_BROKEN = re.compile(
    r"connection (was )?(closed|reset|refused|timed out)|closed by peer|broken pipe|socket (is )?closed"
    r"|\b(read|write|recv|send)\w* (error|failed)|remote process exited|no route to host|network is unreachable",
    re.IGNORECASE,
)


class PeerError(RuntimeError):
    """Raised when another rank has ended. The message names that rank."""


class StallError(RuntimeError):
    """Raised when other ranks do not join an operation. The message says what each rank is doing."""


def is_broken_connection(error: BaseException) -> bool:
    """Return whether ``error`` is a backend's report that the connection to another rank is broken."""
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


def plain(error: BaseException) -> str:
    """Return the message of a backend's ``error``, without its C++ source location and general advice."""
    return re.sub(r"^\[[^\]]*:\d+\] |\. This is typically.*|[\s.]*GLHF!.*", "", str(error), flags=re.DOTALL)


class Gone(NamedTuple):
    """The verdict that ``ranks`` are gone. ``have_ended``: whether they have ended; if False, they are only silent."""

    ranks: list[int]
    have_ended: bool

    def sentence(self, seen: Mapping[int, Seen], silent_s: float | None = None) -> str:
        """Return a sentence that names the ranks, or only those without a goodbye if there are any. ``silent_s``: how
        long the ranks have posted nothing, if they may not have ended."""
        missed = [rank for rank in self.ranks if not seen[rank].post.left]
        named = [seen[rank].post.name(rank) for rank in missed or self.ranks]
        names = " and ".join(named)
        if silent_s is not None:
            return f"{named[0]} has not been heard of for {silent_s:g} s: it has ended or hangs"
        if not missed:
            return (
                f"{names} came to the end of the program: all ranks must make a call that takes all ranks "
                "(gather(), a save, a run), and here some have not"
            )
        ended = "has ended without a word (killed?)"
        return f"{names} {ended}" if len(named) == 1 else f"{names} {ended.replace('has', 'have', 1)}"


class Stuck(NamedTuple):
    """The verdict that all ranks wait. ``places``: what each rank is doing. ``labels``: the message that each waits
    for. ``nobody_comes``: whether each of these messages still lacks some rank; else messages may be on their way."""

    places: list[str]
    labels: list[str]
    nobody_comes: bool


def verdict(seen: Mapping[int, Seen], *, silent_s: float, still_s: float = math.inf) -> Gone | Stuck | None:
    """Judge what ranks have posted. Return None if ranks can go on.

    Args:
        seen: the posts of the ranks to judge. With the posts of only some ranks a :class:`Stuck` means nothing.
        silent_s: a rank without a new beat for this many seconds is gone.
        still_s: ranks are stuck if each of them has been in the same wait for this many seconds.
    """
    ended = [rank for rank, one in seen.items() if one.has_ended]
    gone = ended or [rank for rank, one in seen.items() if one.silent_s >= silent_s]
    if gone:
        return Gone(gone, bool(ended))
    posts = [one.post for one in seen.values()]
    if not posts or not all(one.post.wait and one.still_s >= still_s for one in seen.values()):
        return None

    def is_lacking(post: Post) -> bool:
        """Return whether some rank has sent the message that ``post`` waits for fewer times than ``post``'s rank."""
        asked = post.asked.get(post.label, 0) if post.asked is not None else 0
        return any(other.asked is not None and other.asked.get(post.label, 0) < asked for other in posts)

    return Stuck([post.place for post in posts], [post.label for post in posts], all(map(is_lacking, posts)))


class Peers:
    """Finds out over the store which ranks are gone or stuck, and posts what this rank has found. ``every_s``: seconds
    between the posts of a rank.

    Attributes:
        known: a sentence about the rank that ended or failed first; None if unknown.
    """

    def __init__(
        self, store: Any, prefix: str, rank: int, world_size: int, every_s: float, running_s: RunningTime
    ) -> None:
        self._store, self._prefix, self._every_s = store, prefix, every_s
        self._rank, self._world_size = rank, world_size
        self.posts = Posts(store, prefix, rank, running_s)
        self.known: str | None = None
        self._round = 0
        self._told = False

    @property
    def roll_call_s(self) -> float:
        return max(ROLL_CALL_S, 3 * self._every_s)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._round}/{name}"

    def _read(self, name: str) -> Any:
        key = self._key(name)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _post_first(self, name: str, value: Any) -> Any:
        """Post ``value`` under ``name`` unless some rank has already posted there. Return the value posted there."""
        return json.loads(self._store.compare_set(self._key(name), "", json.dumps(value)))

    def forget(self) -> None:
        """Forget which ranks were gone, and use new store keys, when all ranks go on after an exception. Collective."""
        self._round, self.known, self._told = self._round + 1, None, False

    # -- what ranks have found --------------------------------------------------------------------------------------

    def find_posted(self) -> bool:
        """Set :attr:`known` to what was posted about a rank that ended or failed. Return whether a rank has ended."""
        gone = self._read("gone")
        self.known = gone[1] if gone is not None else self.known or self._read("failed")
        return gone is not None

    def tell(self, error: BaseException) -> None:
        """Post that this rank fails, and its ``error``, so that other ranks can say why this rank is gone."""
        self._told = True
        text = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0][:300]
        self.known = self._post_first("failed", f"{self.posts.own.name(self._rank)} failed with {text}")

    def tell_gone(self, found: str, *, aloud: bool = False) -> str:
        """Post a sentence about the rank that has ended: what :meth:`tell` has posted, else ``found``. A sentence that
        some rank has already posted stays. Return the posted sentence. If the store ends with this process, wait so
        that others can read it. ``aloud``: print it if it is this rank's, in case a launcher soon ends this process."""
        own = [self._rank, self._read("failed") or found]
        first = self._post_first("gone", own)
        self.known = str(first[1])
        if aloud and first == own:
            print(f"rank {self._rank}: {self.known}", file=sys.stderr, flush=True)
        if self._rank == 0 and self._world_size > 2 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(1.25 * self._every_s)
        return self.known

    def leave(self) -> None:
        """Post this rank's goodbye: its process ends normally. Do nothing after :meth:`tell`."""
        if not self._told:
            with contextlib.suppress(Exception):  # the store is gone
                self.posts.write(self.posts.own.place, left=True)

    # -- judging ----------------------------------------------------------------------------------------------------

    def call_roll(self, dying_s: float = 0.0) -> tuple[dict[int, Seen], Gone | None]:
        """Watch other ranks' posts until a process of this machine has ended, each rank has posted again, or silent
        ranks must be gone. Return the posts by rank, and a :class:`Gone` if ranks are gone, else None. ``dying_s``:
        seconds that a process of this machine may still take to end."""
        seen = self.posts.read(rank for rank in range(self._world_size) if rank != self._rank)
        deadline = time.monotonic() + dying_s
        while not any(self.posts.has_ended(one.post) for one in seen.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        first, late = dict(seen), list(seen)
        while True:
            seen |= self.posts.read(late)
            late = [rank for rank in late if seen[rank].post.beat == first[rank].post.beat]
            found = verdict(seen, silent_s=self.roll_call_s)
            if isinstance(found, Gone) or not late:
                return seen, found if isinstance(found, Gone) else None
            time.sleep(self._every_s)

    def culprit(self) -> str:
        """After a broken connection, find within seconds which rank has ended. Return a sentence about that rank."""
        try:
            self.find_posted()
            if self.known is not None:
                return self.known
            seen, gone = self.call_roll(DYING_S)
            if gone is not None:
                return self.tell_gone(gone.sentence(seen), aloud=True)
            self.find_posted()
            return self.known or "a peer broke off, though all ranks still answer"
        except Exception:  # the store is gone
            return self.known or self.without_store()

    def compare_waits(self, wait: str, silent_s: float, asks: bool) -> Gone | Stuck | None:
        """Return a verdict on the waits of all ranks. If all wait, look twice, to see whether they stay in those waits.

        Args:
            wait: index and label of this rank's wait.
            asks: whether to read all posts. If False, read only what another rank has found.
        """
        told = self._read("stuck")
        if told is not None and told[0][self._rank] == wait:
            return Stuck(told[1], told[2], True)  # the rank that found it has raised, and waits no longer
        if not asks:
            return None
        still_s = 2 * self._every_s + STILL_S
        seen = self.posts.read(range(self._world_size))
        if all(one.post.wait for one in seen.values()):
            time.sleep(still_s)
            seen = self.posts.read(range(self._world_size))
        found = verdict(seen, silent_s=silent_s, still_s=still_s)
        if isinstance(found, Stuck) and found.nobody_comes:
            waits = [one.post.wait for one in seen.values()]
            self._store.set(self._key("stuck"), json.dumps([waits, found.places, found.labels]))
        return found

    def without_store(self) -> str:
        """Return a sentence about the rank (or torchrun's agent) that must have ended if the store is gone."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "a rank and torchrun's agent on the first node have ended"
        return f"{self.posts.holder.name(0)}, which holds the store, has ended"
