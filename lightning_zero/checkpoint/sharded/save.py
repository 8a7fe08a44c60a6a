"""Saves a folder: all ranks write, rank 0 makes it, writes the index, and gives it its name."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import torch

from lightning_zero.checkpoint.direct import DirectStream
from lightning_zero.checkpoint.durable import Part, cause_of, leave, naming, said, written_aside
from lightning_zero.checkpoint.sharded.index import EXTRA, INDEX, SUFFIX, make_index, packed, refuse_other_folder
from lightning_zero.checkpoint.sharded.items import Item, items_of
from lightning_zero.checkpoint.sharded.write import Entry, keep, write_items
from lightning_zero.comm.agreements import broadcast_object, collect_objects, together
from lightning_zero.comm.streams import Streams
from lightning_zero.config import ConfigError
from lightning_zero.engine.whole.values import Snapshot
from lightning_zero.ranks.mailbox import Mailbox
from lightning_zero.ranks.progress import SILENT, Count, LongWork
from lightning_zero.ranks.waits import Waits

T = TypeVar("T")


class _Kept(NamedTuple):
    """What a thread is to write.

    Attributes:
        file: is there where there are items.
    """

    items: list[Item]
    snapshot: Snapshot
    file: BinaryIO | None

    def close(self) -> None:
        self.snapshot.close()
        if self.file is not None:
            with contextlib.suppress(OSError):  # of what is buffered yet, after another error
                self.file.close()


def _beside_training(path: Path) -> BinaryIO:
    """A new file, past the page cache, into which the processor would copy while it is to train."""
    return cast(BinaryIO, io.BufferedWriter(DirectStream(path)))


class ShardedSaver:
    """Saves the checkpoints of one run. Where things lie is sent to rank 0 once, and again when it has changed."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._group: Any = None
        self._waits: Waits | None = None
        self._own: list[Entry] = []  # as this rank has sent it
        self._known: list[list[Entry]] = []  # on rank 0: of each rank

    def save(
        self,
        state: Mapping[str, Any],
        extra: Mapping[str, Any],
        path: str | os.PathLike[str],
        group: Any,
        waits: Waits | None,
        *,
        behind: Callable[..., None] | None = None,
        streams: Streams | None = None,
        long_work: LongWork = SILENT,
    ) -> None:
        """Save ``state`` in the folder ``path``. On all ranks.

        Args:
            state: what goes into files of DCP; see :func:`items_of`.
            extra: what goes into ``meta.pt``; rank 0's counts.
            group: of all ranks.
            waits: for the other ranks; None: there are none.
            behind: hands writing over to a thread; None: it is done here.
            streams: of the engine whose values are kept until then.
            long_work: shows how far it is.

        Raises:
            Exception: on all ranks, with folder and cause: it could not be written. What had the name has it still.
        """
        self._group, self._waits = group, waits
        target = Path(path)
        with contextlib.ExitStack() as stack:
            part = self._together("a folder", lambda: self._begin(stack, target, extra))
            made = self._broadcast((str(part.path), Mailbox.new_number()) if part is not None else ("", 0))
            folder, number = Path(made[0]), made[1]
            self._together("seeing its folder", lambda: self._check(folder))
            if behind is not None and streams is not None:
                self._hand_over(stack, state, folder, target, partial(behind, number), streams)
                return
            items, file = items_of(state, self._rank), partial((folder / self._name).open, "wb")
            write = partial(self._write, items, file, target, long_work)
            known = self._collect(self._together("this rank's file", write))
            self._together("its index", lambda: self._end(stack, folder, target, known))

    def _hand_over(
        self,
        stack: contextlib.ExitStack,
        state: Mapping[str, Any],
        folder: Path,
        target: Path,
        begin: Callable[..., None],
        streams: Streams,
    ) -> None:
        def prepare() -> _Kept:
            items, snapshot = keep(items_of(state, self._rank), streams)
            try:
                # Now: where another rank fails, the folder may be gone later.
                return _Kept(items, snapshot, _beside_training(folder / self._name) if items else None)
            except BaseException:
                snapshot.close()
                raise

        kept: _Kept = self._together("keeping values", prepare, undo=_Kept.close)
        rest = stack.pop_all()
        count = Count(sum(item.nbytes for item in kept.items))

        def close(error: BaseException | None) -> None:
            kept.close()
            leave(rest, error)

        begin(
            target,
            lambda: self._news(self._write(kept.items, lambda: kept.file, target, SILENT, kept.snapshot, count)),
            lambda found: self._end(rest, folder, target, self._learn(found)),
            close,
            kept.snapshot.stage,
            count,
        )

    def _begin(self, stack: contextlib.ExitStack, target: Path, extra: Mapping[str, Any]) -> Part | None:
        if self._rank != 0:
            return None
        with naming(target, folder=True):
            refuse_other_folder(target)
        part = stack.enter_context(written_aside(target, folder=True))
        with naming(target, folder=True):
            torch.save(dict(extra), part.path / EXTRA)
        return part

    def _check(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(
                f"zero/checkpoint=sharded: expected a folder that all ranks see, got {folder.parent}, where rank "
                f"{self._rank} does not see what rank 0 has made. Save to a file system that all nodes share, or "
                "choose zero/checkpoint=full."
            )

    @property
    def _name(self) -> str:
        """Of this rank's file."""
        return f"__{self._rank}_0{SUFFIX}"

    def _write(
        self,
        items: Sequence[Item],
        opened: Callable[[], Any],
        target: Path,
        long_work: LongWork,
        snapshot: Snapshot | None = None,
        count: Count | None = None,
    ) -> list[Entry]:
        name = self._name
        outer = sys.exception()
        if not items:
            return []
        try:
            with opened() as file:
                with long_work.bytes(f"saving {target.name}", lambda: sum(item.nbytes for item in items)) as did:
                    entries = write_items(items, file, name, did if count is None else count.did, snapshot)
                    file.flush()
                long_work.call(partial(os.fsync, file.fileno()), f"{target.name}, to the disk")
        except Exception as error:
            cause = cause_of(error, outer)
            text = f"{target / name} could not be written: {said(error, outer)}"
            raise OSError(cause.errno, text) if isinstance(cause, OSError) else RuntimeError(text) from error
        return entries

    def _collect(self, entries: list[Entry]) -> list[list[Entry]]:
        """On rank 0, what each rank has written."""
        if self._waits is None:
            return [entries]
        what = "saving a checkpoint: its index"
        return self._learn(collect_objects(self._group, self._news(entries), self._waits, what))

    def _news(self, entries: list[Entry]) -> list[Entry] | None:
        """What rank 0 is told; None: the same as last time."""
        same, self._own = entries == self._own, entries
        return None if same else entries

    def _learn(self, found: Sequence[list[Entry] | None] | None) -> list[list[Entry]]:
        if found is not None:
            old = self._known or [[] for _ in found]
            self._known = [now if now is not None else before for now, before in zip(found, old, strict=True)]
        return self._known

    def _end(self, stack: contextlib.ExitStack, folder: Path, target: Path, known: list[list[Entry]]) -> None:
        if self._rank == 0:
            index = make_index((entry for entries in known for entry in entries), str(target))
            (folder / INDEX).write_bytes(packed(index))
        stack.close()

    def _together(self, what: str, act: Callable[[], Any], undo: Callable[[Any], Any] = lambda _: None) -> Any:
        if self._waits is None:
            return act()
        return together(self._group, self._waits, f"saving a checkpoint: {what}", act, undo, patient=True)

    def _broadcast(self, value: T) -> T:
        return value if self._waits is None else broadcast_object(self._group, value, 0, self._waits)
