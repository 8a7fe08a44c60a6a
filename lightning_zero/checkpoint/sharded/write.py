"""Write the file of one rank. torch's writer keeps a copy of every view, so of the rank's whole shard, until the file
ends. This one writes each box from where it rests, and reads values in files one bucket at a time."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.durable import begin_sync
from lightning_zero.checkpoint.sharded.items import Item, Path
from lightning_zero.engine.units.home import Home, opened
from lightning_zero.engine.units.kept import Sliced
from lightning_zero.engine.units.param import strides_of
from lightning_zero.engine.whole.snapshot import Snapshot
from lightning_zero.ranks.progress import Did


class Entry(NamedTuple):
    keys: tuple[str, ...]
    paths: tuple[Path, ...]
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


def slices_of(items: Sequence[Item]) -> dict[Home, list[Sliced]]:
    found: dict[Home, list[Sliced]] = {}
    for item in items:
        if item.home is not None:
            assert item.slice is not None
            found.setdefault(item.home, []).append(item.slice)
    return found


def detached(items: Sequence[Item]) -> list[Item]:
    """Copy all values that rest in no home, for a thread that writes ``items`` later."""
    return [item if item.home is not None else item._replace(source=_copy(item.source)) for item in items]


def _copy(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def write_items(
    items: Sequence[Item], file: BinaryIO, name: str, did: Did, snapshot: Snapshot | None = None
) -> list[Entry]:
    """Write ``items`` to ``file``, called ``name`` in the folder. ``did`` gets ``Item.nbytes`` after each item."""
    entries: list[Entry] = []
    for home, own in itertools.groupby(items, key=lambda item: item.home):
        with opened(home) if home is not None and snapshot is None else contextlib.nullcontext():
            for item in own:
                entries.append(_write(item, file, name, snapshot))
                did(item.nbytes)
    return entries


def _write(item: Item, file: BinaryIO, name: str, snapshot: Snapshot | None) -> Entry:
    start, box = file.tell(), item.box
    torch.save(item.source if item.dtype is None else alone(item.tensor(snapshot)), file)
    length = file.tell() - start
    file.flush()
    begin_sync(file.fileno(), start, length)
    return Entry(item.keys, item.paths, item.dtype, item.shape, box.offsets, box.sizes, name, start, length)


def alone(tensor: Tensor) -> Tensor:
    """Return ``tensor``, a view without gaps, as a host tensor whose storage holds nothing else, because torch.save
    writes whole storages. On the host nothing is copied."""
    host = tensor.detach().cpu()
    if not host.numel() or host.untyped_storage().nbytes() == host.nbytes:
        return host
    if strides_of(host) != host.stride():  # gaps, or elements that overlap
        return host.clone(memory_format=torch.contiguous_format)
    # Not ``numpy()``: memory that NumPy has seen cannot be given back, as homes in files do.
    memory = (ctypes.c_char * host.nbytes).from_address(host.data_ptr())
    memory.owner = host  # type: ignore[attr-defined]  # as long as the result lives
    return torch.frombuffer(memory, dtype=host.dtype).as_strided(host.shape, host.stride())
