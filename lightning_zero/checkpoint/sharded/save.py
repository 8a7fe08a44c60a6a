"""Saves a folder: all ranks write, rank 0 makes it, writes the index, and gives it its name."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.durable import Part, cause_of, naming, said, written_aside
from lightning_zero.checkpoint.sharded.index import EXTRA, INDEX, SUFFIX, make_index, packed, refuse_other_folder
from lightning_zero.checkpoint.sharded.items import items_of
from lightning_zero.checkpoint.sharded.write import Entry, write_items
from lightning_zero.comm.agreements import broadcast_object, collect_objects, together
from lightning_zero.config import ConfigError
from lightning_zero.ranks.waits import Waits


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
    ) -> None:
        """Save ``state`` in the folder ``path``. On all ranks.

        Args:
            state: what goes into files of DCP; see :func:`items_of`.
            extra: what goes into ``meta.pt``; rank 0's counts.
            group: of all ranks.
            waits: for the other ranks; None: there are none.

        Raises:
            Exception: on all ranks, with folder and cause: it could not be written. What had the name has it still.
        """
        self._group, self._waits = group, waits
        target = Path(path)
        with contextlib.ExitStack() as stack:
            part = self._together("a folder", lambda: self._begin(stack, target))
            folder = Path(self._broadcast(str(part.path) if part is not None else ""))
            entries = self._together("this rank's file", lambda: self._write(state, folder, target))
            known = self._collect(entries)
            self._together("its index", lambda: self._end(stack, folder, target, known, extra))

    def _begin(self, stack: contextlib.ExitStack, target: Path) -> Part | None:
        if self._rank != 0:
            return None
        with naming(target, folder=True):
            refuse_other_folder(target)
        return stack.enter_context(written_aside(target, folder=True))

    def _write(self, state: Mapping[str, Any], folder: Path, target: Path) -> list[Entry]:
        if not folder.is_dir():
            raise ConfigError(
                f"zero/checkpoint=sharded: expected a folder that all ranks see, got {folder.parent}, where rank "
                f"{self._rank} does not see what rank 0 has made. Save to a file system that all nodes share, or "
                "choose zero/checkpoint=full."
            )
        name = f"__{self._rank}_0{SUFFIX}"
        items, outer = items_of(state, self._rank), sys.exception()
        if not items:
            return []
        try:
            with (folder / name).open("wb") as file:
                entries = write_items(items, file, name)
                file.flush()
                os.fsync(file.fileno())
        except Exception as error:
            cause = cause_of(error, outer)
            text = f"{target / name} could not be written: {said(error, outer)}"
            raise OSError(cause.errno, text) if isinstance(cause, OSError) else RuntimeError(text) from error
        return entries

    def _collect(self, entries: list[Entry]) -> list[list[Entry]]:
        """On rank 0, what each rank has written. Ranks that have written the same things as before say only that."""
        same, self._own = entries == self._own, entries
        if self._waits is None:
            return [entries]
        found = collect_objects(self._group, None if same else entries, self._waits, "saving a checkpoint: its index")
        if found is not None:
            old = self._known or [[] for _ in found]
            self._known = [now if now is not None else before for now, before in zip(found, old, strict=True)]
        return self._known

    def _end(
        self,
        stack: contextlib.ExitStack,
        folder: Path,
        target: Path,
        known: list[list[Entry]],
        extra: Mapping[str, Any],
    ) -> None:
        if self._rank == 0:
            torch.save(dict(extra), folder / EXTRA)
            index = make_index((entry for entries in known for entry in entries), str(target))
            (folder / INDEX).write_bytes(packed(index))
        stack.close()

    def _together(self, what: str, act: Callable[[], Any]) -> Any:
        if self._waits is None:
            return act()
        return together(self._group, self._waits, f"saving a checkpoint: {what}", act, patient=True)

    def _broadcast(self, value: str) -> str:
        return value if self._waits is None else broadcast_object(self._group, value, 0, self._waits)
