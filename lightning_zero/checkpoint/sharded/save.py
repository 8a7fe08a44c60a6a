"""Save a checkpoint folder: every rank writes a file; rank 0 makes the folder, writes the index and renames the folder.
In an object store, writing the index makes the new checkpoint valid (see ``tiers/remote.py``).

torch's writer copies every view, so it holds a copy of the rank's whole shard until the file is complete. This writer
takes each box from the memory that holds it, and reads offloaded values from their files one bucket at a time."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.durable import begin_sync, leave, naming, written_aside
from lightning_zero.checkpoint.sharded.index import EXTRA, SUFFIX, as_bytes, make_index, refuse_other_folder
from lightning_zero.checkpoint.sharded.items import Entry, Item, Snapshot, items_of
from lightning_zero.comm.agreements import broadcast_object, collect_objects, gather_objects, together
from lightning_zero.device.streams import Streams
from lightning_zero.engine.units.master_storage import FileStorage, FlatSlice, MasterStorage, opened
from lightning_zero.engine.units.param import strides_of
from lightning_zero.ranks.posts import machine
from lightning_zero.ranks.progress import SILENT, Count, LongWork
from lightning_zero.ranks.waits import Waits
from lightning_zero.settings import ConfigError
from lightning_zero.tiers.limits import available_host_memory
from lightning_zero.tiers.pages import HostPages, byte_view
from lightning_zero.tiers.remote import INDEX, Place, RemotePath, place

# Host, new bytes for copies, bytes that are free there, whether values are in files.
_Needs = tuple[str, int, int, bool]


class Behind(NamedTuple):
    """What a save in the background needs. ``begin``: starts the thread that writes. ``streams``: for the copies to the
    host. ``spare``: host memory of earlier copies, for reuse."""

    begin: Callable[..., None]
    streams: Streams
    spare: list[HostPages]


def save_folder(
    state: Mapping[str, Any],
    extra: Mapping[str, Any],
    path: str | Place,
    group: Any = None,
    waits: Waits | None = None,
    *,
    behind: Behind | None = None,
    long_work: LongWork = SILENT,
) -> None:
    """Save ``state`` in the folder ``path``. Collective.

    If the folder cannot be written, all ranks raise an error that names it and the cause; ``path`` is unchanged.

    Args:
        state: the values for the ranks' ``.distcp`` files; see :func:`items_of`.
        extra: the values for ``meta.pt``; only rank 0's are saved.
        group: the process group of all ranks.
        waits: how this rank waits for the others; None: there is only one rank.
        behind: if given and possible, write in a thread while training continues; None: write before returning.
        long_work: reports progress.
    """
    target, rank = place(path), waits.rank if waits is not None else 0

    def on_all(what: str, act: Callable[[], Any], undo: Callable[[Any], Any] = lambda _: None) -> Any:
        if waits is None:
            return act()
        return together(group, waits, f"saving a checkpoint: {what}", act, undo, patient=True)

    with contextlib.ExitStack() as stack:
        made = on_all("a folder", lambda: _begin(stack, target, extra) if rank == 0 else "")
        rest_of = place(made if waits is None else broadcast_object(group, made, 0, waits))
        on_all("seeing its folder", lambda: _check(rest_of, rank))

        def write() -> list[Entry]:
            with contextlib.closing(_RankFile(items_of(state, rank), rank, rest_of, target)) as file:
                return file.write(long_work)

        items: list[Item] = on_all("the values to copy", lambda: items_of(state, rank)) if behind is not None else []
        why = ""
        if behind is not None:
            needs = _needs(behind, items)
            why = _why_not([needs] if waits is None else gather_objects(group, needs, waits, "room for copies"))
        if why and rank == 0:
            warnings.warn(f"zero.checkpoint.background: training waits for this save, because {why}.", stacklevel=2)
        if behind is None or why:
            entries: Any = on_all("this rank's file", write)
            found = [entries] if waits is None else collect_objects(group, entries, waits, "saving a checkpoint: index")
            on_all("its index", lambda: _end(stack, rest_of, target, found))
            return
        # Open the file now: if another rank fails, the folder may be gone later.
        keep = partial(_RankFile, items, rank, rest_of, target, behind)
        file = on_all("copying values", keep, undo=_RankFile.close)
        rest = stack.pop_all()
        rest.callback(file.close)
        try:
            end = partial(_end, rest, rest_of, target)
            behind.begin(target, str(rest_of), file.write, end, partial(leave, rest), file.count)
        except BaseException as error:
            leave(rest, error)
            raise


def _begin(stack: contextlib.ExitStack, target: Place, extra: Mapping[str, Any]) -> str:
    """Make the folder that becomes ``target`` when ``stack`` is closed, and write ``extra`` to a file in the folder.
    Return the address of that file."""
    with naming(target, folder=True):
        refuse_other_folder(target)
    if isinstance(target, RemotePath):
        rest_of: Place = stack.enter_context(_objects(target))
    else:
        rest_of = stack.enter_context(written_aside(target, folder=True)).path / EXTRA
    with naming(target, folder=True), contextlib.closing(rest_of.open("wb")) as file:
        torch.save(dict(extra), file)
    return str(rest_of)


@contextlib.contextmanager
def _objects(target: RemotePath) -> Iterator[RemotePath]:
    """In a save to an object store, yield the address of the file that holds all but modules and optimizers. On exit,
    copy this file to ``meta.pt`` and delete the objects of earlier saves. The body must write the index."""
    token = uuid.uuid4().hex[:12]
    yield target / f"meta_{token}.pt"
    try:
        (target / EXTRA).write_bytes((target / f"meta_{token}.pt").read_bytes())
        for old in target.iterdir():
            if old.name not in (INDEX, EXTRA) and token not in old.name:
                old.unlink()
        if target.is_file():  # a checkpoint that was one file
            target.unlink()
    except Exception as error:  # the new checkpoint is there
        warnings.warn(f"{target}: the earlier checkpoint of this name could not be removed: {error}", stacklevel=2)


def _check(rest_of: Place, rank: int) -> None:
    if not rest_of.is_file():
        raise ConfigError(
            f"zero/checkpoint=sharded: expected a folder that all ranks see, got {rest_of.parent.parent}, where rank "
            f"{rank} does not see the folder that rank 0 has made. Save to a file system that all nodes share, or "
            "choose zero/checkpoint=full."
        )


def _needs(behind: Behind, items: Sequence[Item]) -> _Needs:
    wanted = slices_of(items)
    new = Snapshot.nbytes(wanted) - sum(pages.nbytes for pages in behind.spare)
    return machine(), max(new, 0), available_host_memory(), any(isinstance(s, FileStorage) for s in wanted)


def _why_not(ranks: Sequence[_Needs]) -> str:
    """Return the reason why a save cannot run in the background; empty if it can. ``ranks``: the needs of each rank."""
    if any(in_files for *_, in_files in ranks):
        return "the values to save are in files"
    lack = any(sum(n for at, n, *_ in ranks if at == host) > free for host, new, free, _ in ranks if new)
    return "there is not enough host memory for a copy of the values" if lack else ""


def _end(stack: contextlib.ExitStack, rest_of: Place, target: Place, found: Sequence[list[Entry]] | None) -> None:
    if found is not None:
        index = make_index((entry for entries in found for entry in entries), str(target), rest_of.name)
        (rest_of.parent / INDEX).write_bytes(as_bytes(index))
    stack.close()


class _RankFile:
    """A rank's file of the checkpoint, to which :meth:`write` writes ``items``. No file is made if there are no items.
    With ``behind``, the written values are those of the time when this object was made."""

    def __init__(
        self, items: Sequence[Item], rank: int, rest_of: Place, target: Place, behind: Behind | None = None
    ) -> None:
        save = rest_of.name.removesuffix(".pt").removeprefix("meta").strip("_") or "0"
        self._name, self._target = f"__{rank}_{save}{SUFFIX}", target
        self._file: Any = None
        self._items, self._snapshot = items, None
        self.count = Count(sum(item.nbytes for item in items))
        if behind is not None:
            self._items = detached(items)
            self._snapshot = Snapshot(slices_of(items), behind.streams, behind.spare)
        try:
            with naming(target / self._name):
                path = rest_of.parent / self._name
                if self._items:
                    self._file = path.open("wb", self.count.total if isinstance(path, RemotePath) else -1)
        except BaseException:
            self.close()
            raise

    def write(self, long_work: LongWork = SILENT) -> list[Entry]:
        if self._snapshot is not None:
            self._snapshot.stage()
        if self._file is None:
            return []
        entries: list[Entry] = []
        with naming(self._target / self._name):
            with long_work.bytes(f"saving {self._target.name}", lambda: self.count.total) as did:
                for storage, own in itertools.groupby(self._items, key=lambda item: item.storage):
                    with (
                        opened(storage) if storage is not None and self._snapshot is None else contextlib.nullcontext()
                    ):
                        for item in own:
                            entries.append(self._write(item, self._file))
                            did(item.nbytes)
                            self.count.did(item.nbytes)
            if isinstance(self._target, RemotePath):
                self._file.close()  # ends the upload
            else:
                long_work.call(partial(os.fsync, self._file.fileno()), f"{self._target.name}, to the disk")
        return entries

    def _write(self, item: Item, file: Any) -> Entry:
        start, box = file.tell(), item.box
        torch.save(item.source if item.dtype is None else alone(item.tensor(self._snapshot)), file)
        length = file.tell() - start
        if not isinstance(self._target, RemotePath):
            begin_sync(file.fileno(), start, length)
        return Entry(item.keys, item.paths, item.dtype, item.shape, box.offsets, box.sizes, self._name, start, length)

    def close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
        if self._file is not None:
            with contextlib.suppress(Exception):  # flushing buffered bytes after another error
                self._file.close()


def slices_of(items: Sequence[Item]) -> dict[MasterStorage, list[FlatSlice]]:
    found: dict[MasterStorage, list[FlatSlice]] = {}
    for item in items:
        if item.storage is not None:
            assert item.slice is not None
            found.setdefault(item.storage, []).append(item.slice)
    return found


def detached(items: Sequence[Item]) -> list[Item]:
    """Return ``items`` with a copy of each value that is in no :class:`MasterStorage`, for a thread to write later."""
    found = []
    for item in items:
        value = item.source
        if item.storage is None:
            value = value.to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        found.append(item._replace(source=value))
    return found


def alone(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor`` as a host tensor whose storage has no other values, because torch.save writes
    complete storages. A host tensor without gaps between its elements is not copied."""
    host = tensor.detach().cpu()
    if not host.numel() or host.untyped_storage().nbytes() == host.nbytes:
        return host
    if strides_of(host) != host.stride():  # gaps, or elements that overlap
        return host.clone(memory_format=torch.contiguous_format)
    flat = host.as_strided((host.numel(),), (1,))
    return torch.frombuffer(byte_view(flat), dtype=host.dtype).as_strided(host.shape, host.stride())
