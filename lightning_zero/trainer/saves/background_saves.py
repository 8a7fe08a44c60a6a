"""Write checkpoint folders in the background while training continues: ``zero.checkpoint.background``.

::

    main thread                                       a thread of each rank
    save: collect names and small values, make the folder
    train, and wait before a step changes a shard     copy the shards (checkpoint/sharded/items.py)
    train                                             write and sync the rank's file
    train                                             rank 0, after all ranks: write the index, name the folder
    train                                             rank 0: link last.ckpt to it, remove an older checkpoint
    the next step, save or end: raise an error of the save on all ranks

Ranks report written parts to rank 0 through the store (``ranks/mailbox.py``). Only rank 0's thread waits for other
ranks, and nothing from the store is unpickled. ``dcp.async_save`` unpickles messages of ranks, and waits for a dead
rank until its process group times out. Shards are copied as by DCP's ``DefaultStager``. Copying one storage at a time
in low-priority threads was no better (``make bench-checkpoint``, 98 M parameters, 2 ranks, 2 idle cores, 2026-11-23)::

                                      stall s   durable s   MiB
    one storage at a time             0.030     2.35        396
    dcp.async_save, DefaultStager     0.024     2.01        382
    dcp.async_save                    0.560     3.45        560
    a folder, while training waits    0.582     0.582        17
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.checkpoint.durable import naming
from lightning_zero.device.host_threads import set_own_threads
from lightning_zero.ranks.mailbox import Mailbox
from lightning_zero.ranks.progress import SILENT, Count, LongWork
from lightning_zero.ranks.waits import Waits
from lightning_zero.tiers.pages import HostPages

T = TypeVar("T")


class _Failure(NamedTuple):
    text: str


class BackgroundSaves:
    """Runs a strategy's background saves, one at a time. ``may_fail``: whether training continues if the save fails;
    the same on all ranks. ``spare``: memory that the next save reuses for its copies of shards."""

    def __reduce__(self) -> Any:
        return type(self), ()  # a copied strategy starts without saves

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # fails if any earlier task has failed
        self._hurry = threading.Event()
        self._name = ""
        self._count: Count | None = None
        self.spare: list[HostPages] = []
        self.may_fail = False

    @property
    def is_under_way(self) -> bool:
        """Return whether a save has begun and :meth:`wait` has not been called since. All ranks return the same."""
        return self._last is not None

    @property
    def has_failed(self) -> bool:
        """Return whether this rank already knows that the save under way has failed. Does not wait."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def begin(
        self,
        waits: Waits | None,
        path: Path,
        key: str,
        write: Callable[[], T],
        end: Callable[[Sequence[T]], Any],
        close: Callable[[BaseException | None], Any],
        count: Count,
        *,
        may_fail: bool,
    ) -> None:
        """Start a save in this rank's thread. Collective.

        Args:
            waits: tells whether other ranks still answer; None in a lone process.
            key: names the save's mailbox in the store.
            write: writes this rank's part, and returns a value for ``end``.
            end: called on rank 0 with the values of all ranks, in rank order.
            close: called last, with the save's error or None.
            count: counts the bytes that ``write`` has written so far.
        """
        rank, world_size = (waits.rank, waits.world_size) if waits is not None else (0, 1)
        mail = Mailbox(key, rank, world_size)

        def run() -> None:
            try:
                with naming(path):
                    mail.post(write())
                    if rank == 0:
                        end(self._parts(mail, waits))
            except BaseException as error:
                mail.post(_Failure(str(error)))
                close(error)
                raise
            close(None)

        self.may_fail, self._name, self._count = may_fail, path.name, count
        self._hurry.clear()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "lightning_zero-saves", lambda: set_own_threads(1))
        self._last = self._threads.submit(run)

    def _parts(self, mail: Mailbox, waits: Waits | None) -> list[Any]:
        def give_up(missing: Sequence[int], quiet_s: float) -> str:
            if waits is None or not self._hurry.is_set():  # disks may be slow; a dead rank ends the run anyway
                return ""
            gone = waits.silent()
            if any(rank in gone for rank in missing) or quiet_s > waits.stall_timeout_s:
                return f"rank(s) {list(missing)} ended, or stopped answering, before they had written their parts"
            return ""

        parts = mail.collect(give_up)
        for rank, part in enumerate(parts):
            if isinstance(part, _Failure):
                raise RuntimeError(f"rank {rank}: {part.text}")
        return parts

    def then(self, act: Callable[[], Any]) -> None:
        """Call ``act`` after the save under way, unless the save fails. If no save is under way, call ``act`` now."""
        if self._last is None or self._threads is None:
            act()
            return

        def run(before: Future[None] = self._last) -> None:
            before.result()
            act()

        self._last = self._threads.submit(run)

    def wait(self, long_work: LongWork = SILENT) -> None:
        """Wait until this rank's thread is idle. If the save failed, raise its error, with file and cause."""
        last, self._last = self._last, None
        if last is not None:
            long_work.wait(last, f"saving {self._name}", self._count)
            last.result()

    def wait_alone(self, long_work: LongWork = SILENT) -> None:
        """Wait as :meth:`wait` does, but only warn of errors. For use after an exception, when ranks may be gone."""
        self._hurry.set()
        try:
            self.wait(long_work)
        except Exception as error:
            rank_zero_warn(str(error))

    def close(self) -> None:
        """Free the spare memory for copies of shards. Call this method only when no save is under way."""
        while self.spare:
            self.spare.pop().close()
