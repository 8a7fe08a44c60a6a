"""Saves of folders that go on behind training: ``zero.checkpoint.background``.

::

    main thread                                       a thread of each rank
    save: names, small values; the folder
    train, and wait before a step changes a shard     copies of the shards (engine/whole/snapshot.py)
    train                                             its file, to the disk
    train                                             rank 0, when all have: the index, the name
    train                                             rank 0: last.ckpt leads there, an older one is removed
    the next step, save or end: an error, on all ranks

Ranks tell rank 0 what they have written through the store (``ranks/mailbox.py``), so no rank waits for another one, and
nothing that comes from the store is unpickled. ``dcp.async_save`` unpickles what ranks send each other, and waits for a
dead rank as long as its process group does. Copies are made as by DCP's ``DefaultStager``: it was as good as copies of
one home at a time that were written past the page cache by threads of lowest priority (``make bench-checkpoint``, 98 M
parameters, 2 ranks on 2 idle cores, 2026-11-23)::

                                      stall s   durable s   MiB
    those copies                      0.030     2.35        396
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
from torch import Tensor

from lightning_zero.checkpoint.durable import naming
from lightning_zero.device.host_threads import set_own_threads
from lightning_zero.ranks.mailbox import Mailbox
from lightning_zero.ranks.progress import SILENT, Count, LongWork
from lightning_zero.ranks.waits import Waits

T = TypeVar("T")


class _Failure(NamedTuple):
    """What a rank posts in the place of its part."""

    text: str


class BackgroundSaves:
    """Runs the saves of one strategy, of which one at a time is under way.

    Attributes:
        may_fail: training goes on if the save that is under way fails. The same on all ranks.
        spare: memory of the last copies, for the next ones.
    """

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy of a strategy has saves of its own

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # fails with all that were given before
        self._hurry = threading.Event()
        self._name = ""
        self._count: Count | None = None
        self.spare: list[Tensor] = []
        self.may_fail = False

    @property
    def is_under_way(self) -> bool:
        """Whether one was begun, and nobody has waited for it since. The same on all ranks."""
        return self._last is not None

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of a failure. Nothing is waited for."""
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
        """Begin to write. On all ranks.

        Args:
            key: of its mailbox.
            write: this rank's part; rank 0 gets what it returns.
            end: is called on rank 0 with what all ranks have returned, in rank order.
            close: is called at the end in any case, with the error that has kept it from being written.
            count: of what ``write`` has written.
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
            if waits is None or not self._hurry.is_set():  # a disk may be slow, and a rank that is gone ends the run
                return ""
            gone = waits.silent()
            if any(rank in gone for rank in missing) or quiet_s > waits.stall_timeout_s:
                return f"rank(s) {list(missing)} have ended, or do not answer, before they had written their part"
            return ""

        parts = mail.collect(give_up)
        for rank, part in enumerate(parts):
            if isinstance(part, _Failure):
                raise RuntimeError(f"rank {rank}: {part.text}")
        return parts

    def then(self, act: Callable[[], Any]) -> None:
        """Do this when what is under way is written, and not if it failed: here and now if nothing is."""
        if self._last is None or self._threads is None:
            act()
            return

        def run(before: Future[None] = self._last) -> None:
            before.result()
            act()

        self._last = self._threads.submit(run)

    def wait(self, long_work: LongWork = SILENT) -> None:
        """Wait until this rank has nothing to do any more.

        Args:
            long_work: shows how far it is.

        Raises:
            Exception: what has failed, with file and cause.
        """
        last, self._last = self._last, None
        if last is not None:
            long_work.wait(last, f"saving {self._name}", self._count)
            last.result()

    def wait_alone(self, long_work: LongWork = SILENT) -> None:
        """As :meth:`wait`, where other ranks may be gone; what has failed is said."""
        self._hurry.set()
        try:
            self.wait(long_work)
        except Exception as error:
            rank_zero_warn(str(error))
