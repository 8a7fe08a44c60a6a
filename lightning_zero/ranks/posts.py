"""What each rank is doing, posted in the store every few seconds for the other ranks to read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple


def machine() -> str:
    """Return a name of this machine and pid namespace. Process ids are comparable only if these names are equal."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return boot or socket.gethostname()


def is_alive(pid: int) -> bool:
    """Return whether the process ``pid`` of this machine lives (a zombie does not). Return True if this cannot be found
    out, because there is no /proc or this process can open no more files."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return not Path("/proc/self/stat").exists()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class RunningTime:
    """Counts the seconds in which this process runs. A job that a scheduler has suspended, or a process that a debugger
    has held, must not consider other ranks late when it continues.

    A thread calls this object every few seconds. More than ``pause_s`` seconds between two calls count as a pause.

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
class Post:
    """What a rank has posted.

    Attributes:
        beat: how many times the rank has posted.
        place: what the rank is doing, in words.
        wait: index and label of the message that the rank waits for; empty if it waits for none.
        asked: how often the rank has sent or waited for each message, by label. None if ``wait`` is new or empty.
        left: whether the rank has said goodbye, because its process ends normally.
    """

    host: str = ""
    pid: int = 0
    machine: str = ""
    beat: int = 0
    place: str = "unknown: it has posted nothing"
    wait: str = ""
    asked: Mapping[str, int] | None = None
    left: bool = False

    @property
    def label(self) -> str:
        return self.wait.partition(": ")[2]

    def name(self, rank: int) -> str:
        return f"rank {rank} (on {self.host}, process {self.pid})" if self.beat else f"rank {rank}"


class Seen(NamedTuple):
    """The last post of a rank, as seen by this rank.

    Attributes:
        has_ended: whether the rank's process was on this machine and has ended.
        silent_s: for how many seconds this rank has seen no new beat of that rank.
        still_s: for how many seconds this rank has seen that rank in the same wait.
    """

    post: Post
    has_ended: bool = False
    silent_s: float = 0.0
    still_s: float = 0.0


class Posts:
    """Writes this rank's post and reads other ranks' posts. ``store``: a connection on which no call blocks for long.

    Attributes:
        own: the last post of this rank.
        holder: the last seen post of rank 0, which holds the store.
    """

    def __init__(self, store: Any, prefix: str, rank: int, running_s: RunningTime) -> None:
        self._store, self._prefix, self._rank, self._running_s = store, prefix, rank, running_s
        self.own = Post(socket.gethostname(), os.getpid(), machine())
        self.holder = Post()
        self._writes = threading.Lock()  # a beat must not replace a goodbye
        self._changed: dict[int, tuple[int, float, str, float]] = {}  # beat and wait, each with when it was first seen
        self.write("starting")

    def write(self, place: str, wait: str = "", asked: Mapping[str, int] | None = None, *, left: bool = False) -> None:
        with self._writes:
            counts = dict(asked) if asked is not None and wait and wait == self.own.wait else None
            beat, left = self.own.beat + 1, left or self.own.left
            self.own = replace(self.own, beat=beat, place=place, wait=wait, asked=counts, left=left)
            self._store.set(f"{self._prefix}/{self._rank}", json.dumps(asdict(self.own)))

    def read(self, ranks: Iterable[int]) -> dict[int, Seen]:
        """Return the last post of each of ``ranks``, by rank."""
        keys = {rank: f"{self._prefix}/{rank}" for rank in ranks}
        known = keys
        if not self._store.check(list(keys.values())):
            known = {rank: key for rank, key in keys.items() if self._store.check([key])}
        texts = self._store.multi_get(list(known.values())) if known else []
        posts = dict.fromkeys(keys, Post())
        posts |= {rank: Post(**json.loads(text)) for rank, text in zip(known, texts, strict=True)}
        self.holder = posts.get(0, self.holder)
        now = self._running_s()
        return {rank: self._seen(rank, post, now) for rank, post in posts.items()}

    def _seen(self, rank: int, post: Post, now: float) -> Seen:
        beat, since, wait, still_since = self._changed.get(rank, (-1, now, "", now))
        since = since if post.beat == beat else now
        still_since = still_since if post.wait == wait else now
        self._changed[rank] = post.beat, since, post.wait, still_since
        return Seen(post, self.has_ended(post), now - since, now - still_since)

    def has_ended(self, post: Post) -> bool:
        """Return whether the process of ``post`` was on this machine and has ended."""
        return post.machine == self.own.machine and not is_alive(post.pid)
