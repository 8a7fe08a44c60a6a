"""Saves that go on behind training: ``zero.checkpoint.background``.

::

    main thread                                       threads of each rank
    save: names, small values; holes or a folder
          what is kept of each home (kept.py)
    train                                             copies; its ranges, or its file, to the disk
    train                                             rank 0, when all have: checksums or the index, the name
    train                                             rank 0: last.ckpt leads there, an older one is removed
    the next step, save or end: an error, on all ranks

Ranks tell rank 0 what they have written through the store (``ranks/mailbox.py``), so no rank waits for another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning_utilities.core.rank_zero import WarningCache, rank_zero_warn

from lightning_zero.checkpoint.background import Background
from lightning_zero.checkpoint.durable import naming
from lightning_zero.ranks.mailbox import Mailbox
from lightning_zero.ranks.progress import SILENT, Count, LongWork
from lightning_zero.ranks.waits import Waits

T = TypeVar("T")
_SAID = WarningCache()


def not_behind(why: str) -> None:
    """Say, once for each reason, that training waits for saves."""
    _SAID.warn(f"zero.checkpoint.background: training waits for this save, because {why}.")


class _Failure(NamedTuple):
    """What a rank posts in the place of its part."""

    text: str


class BackgroundSaves:
    """The saves of one strategy, of which one at a time is under way.

    Attributes:
        is_under_way: one was begun, and nobody has waited for it since. The same on all ranks, as is
        may_fail: training goes on if it fails.
    """

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy of a strategy has saves of its own

    def __init__(self) -> None:
        self._background = Background()
        self._hurry = threading.Event()
        self._name = ""
        self._count: Count | None = None
        self.is_under_way = self.may_fail = False

    def begin(
        self,
        waits: Waits | None,
        number: int,
        path: Path,
        write: Callable[[], T],
        end: Callable[[Sequence[T]], Any],
        close: Callable[[BaseException | None], Any],
        copy: Callable[[], Any],
        count: Count | None = None,
        *,
        may_fail: bool,
    ) -> None:
        """Begin to write. On all ranks.

        Args:
            number: of its mailbox.
            write: this rank's part; rank 0 gets what it returns.
            end: is called on rank 0 with what all ranks have returned, in rank order.
            close: is called at the end in any case, with the error that has kept it from being written.
            copy: is done before ``write``, for steps that follow soon.
            count: of what ``write`` has written.
        """
        rank, world_size = (waits.rank, waits.world_size) if waits is not None else (0, 1)
        mail = Mailbox(number, rank, world_size)

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

        self.is_under_way, self.may_fail = True, may_fail
        self._name, self._count = path.name, count
        self._hurry.clear()
        self._background.do(run, copy)

    def _parts(self, mail: Mailbox, waits: Waits | None) -> list[Any]:
        def give_up(missing: Sequence[int], quiet_s: float) -> str:
            if waits is None or not self._hurry.is_set():  # a disk may be slow, and a rank that is gone ends the run
                return ""
            gone = waits.silent()
            if any(rank in gone for rank in missing) or quiet_s > waits.stall_timeout_s:
                return f"rank(s) {list(missing)} have ended, or do not answer, before they had written their part"
            return ""

        found = mail.collect(give_up)
        for rank, part in enumerate(found):
            if isinstance(part, _Failure):
                raise RuntimeError(f"rank {rank}: {part.text}")
        return found

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of a failure. Nothing is waited for."""
        return self._background.has_failed

    def then(self, act: Callable[[], Any]) -> None:
        """Do this when what is under way is written, and not if it failed."""
        self._background.then(act)

    def wait(self, long_work: LongWork = SILENT) -> None:
        """Wait until this rank has nothing to do any more.

        Args:
            long_work: shows how far it is.

        Raises:
            Exception: what has failed, with file and cause.
        """
        self._background.wait(long_work, f"saving {self._name}", self._count)

    def wait_alone(self, long_work: LongWork = SILENT) -> None:
        """As :meth:`wait`, where other ranks may be gone; what has failed is said."""
        self._hurry.set()
        try:
            self.wait(long_work)
        except Exception as error:
            rank_zero_warn(str(error))
        self.is_under_way = False
