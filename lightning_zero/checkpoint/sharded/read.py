"""Open a checkpoint folder. Its tensors are returned as :class:`StoredTensor`, of which each rank reads its ranges."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_zero.checkpoint.sharded.index import extra_of, read_index
from lightning_zero.checkpoint.sharded.items import unflattened
from lightning_zero.planning.boxes import boxes
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.ranks.resume import refusal
from lightning_zero.settings import MIB, ConfigError
from lightning_zero.tiers.remote import Place, Ranges, RemotePath, place


class Slice(Ranges):
    """A readable view of bytes ``[start, start + length)`` of ``file``."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        def fetch(low: int, high: int) -> bytes:
            file.seek(start + low)
            return file.read(high - low)

        super().__init__(fetch, length)


class _Blob(NamedTuple):
    """Describes where a file of the checkpoint has the values of one tensor, which torch.save has written."""

    path: Place
    start: int  # of its values, in bytes
    tensor: Tensor  # on meta: shape, strides and storage offset


class ShardedFolder:
    """A checkpoint folder, opened for reading. The constructor raises ConfigError, which names the file, if the
    checkpoint is incomplete, and OSError if a file cannot be read."""

    def __init__(self, path: str | Place) -> None:
        self.path = place(path)
        self.index: Metadata = read_index(self.path)
        self.extra = self.path / extra_of(self.index)
        self._files: dict[str, Any] = {}
        self._blobs: dict[MetadataIndex, _Blob] = {}
        self._tensors: dict[Any, StoredTensor] = {}

    @cached_property
    def keys(self) -> list[str]:
        return list(self.index.state_dict_metadata)

    def path_of(self, key: str) -> tuple[Any, ...]:
        """Return the names and list indices that lead to the value of ``key`` in the saved state. If the index does not
        have them, return ``key`` split at its first dot."""
        known = (self.index.planner_data or {}).get(key)
        return tuple(known) if known is not None else tuple(key.split(".", 1))

    def is_tensor(self, key: str) -> bool:
        return isinstance(self.index.state_dict_metadata[key], TensorStorageMetadata)

    def tensor(self, key: str) -> StoredTensor:
        """Return the tensor of ``key`` without reading its values. For keys that share bytes in the files (tied
        parameters) the same object is returned."""
        entry = cast(TensorStorageMetadata, self.index.state_dict_metadata[key])
        infos = (self.index.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in entry.chunks)
        places = tuple((info.relative_path, info.offset) for info in infos) or key
        if places not in self._tensors:
            self._tensors[places] = StoredTensor(
                entry.size, entry.properties.dtype, lambda start, stop, order: self._read(key, start, stop, order)
            )
        return self._tensors[places]

    def value(self, key: str, *, weights_only: bool = True) -> Any:
        """Load and return the value of ``key``, which is not a tensor. With ``weights_only``, raises
        pickle.UnpicklingError if loading the value would run code."""
        info = self.index.storage_data[MetadataIndex(key)]
        with self._opened(self.path / info.relative_path) as file:
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=weights_only)

    def _read(self, key: str, start: int, stop: int, order: Sequence[int] | None) -> Tensor:
        entry = cast(TensorStorageMetadata, self.index.state_dict_metadata[key])
        dims = tuple(order) if order is not None else tuple(range(len(entry.size)))
        flat = torch.empty(stop - start, dtype=entry.properties.dtype)
        found = 0
        for box in boxes(entry.size, start, stop, dims):
            target = unflattened(flat[box.start - start : box.start - start + box.numel], box.sizes, dims)
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for item in create_read_items_for_chunk_list(key, entry, [chunk]):
                part = target[tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths, strict=True))]
                self._read_box(item.storage_index, item.storage_offsets, part)
                found += part.numel()
        if found != len(flat):
            raise ConfigError(refusal(self.path, f"it has {found:,} of {len(flat):,} elements of a part of {key}"))
        return flat

    def _read_box(self, place: MetadataIndex, offsets: Sequence[int], target: Tensor) -> None:
        """Fill ``target`` with a box of its shape, at ``offsets`` in the stored tensor of index entry ``place``. Reads
        all bytes from the first to the last value, directly into ``target`` if memory layout and dtype are equal."""
        blob = self._blob(place)
        sizes, strides = tuple(target.shape), blob.tensor.stride()
        first = int(blob.tensor.storage_offset()) + sum(o * s for o, s in zip(offsets, strides, strict=True))
        count = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        lies = [s for n, s in zip(sizes, target.stride(), strict=True) if n > 1]
        alike = lies == [s for n, s in zip(sizes, strides, strict=True) if n > 1] and count == target.numel()
        direct = alike and target.dtype == blob.tensor.dtype
        if direct:
            memory = target.as_strided((count,), (1,), target.storage_offset())
        else:
            memory = torch.empty(count, dtype=blob.tensor.dtype)
        with self._opened(blob.path) as file:
            file.seek(blob.start + first * memory.itemsize)
            _fill(memory, file, blob.path)
        if not direct:
            target.copy_(memory.as_strided(sizes, strides))

    @contextlib.contextmanager
    def _opened(self, path: Place) -> Iterator[Any]:
        """Yield the file ``path`` of the folder, opened for reading. A file in an object store is opened once and stays
        open, with a cache of the blocks that were read from it."""
        if isinstance(path, RemotePath):
            if path.name not in self._files:
                self._files[path.name] = path.open("rb")
            yield self._files[path.name]
        else:
            with path.open("rb") as file:
                yield file

    def _blob(self, place: MetadataIndex) -> _Blob:
        if (found := self._blobs.get(place)) is not None:
            return found
        info = self.index.storage_data[place]
        path = self.path / info.relative_path
        with self._opened(path) as file:
            try:
                view: Any = Slice(file, info.offset, info.length)
                tensor = torch.load(view, map_location="meta", weights_only=True)
                view.seek(0)
                start = info.offset + cast(Any, torch._C.PyTorchFileReader(view)).get_record_offset("data/0")
            except Exception as error:
                cause = f"its values of {place.fqn} cannot be read: {type(error).__name__}: {error}"
                raise ConfigError(refusal(path, cause)) from error
        self._blobs[place] = _Blob(path, start, tensor)
        return self._blobs[place]


def _fill(memory: Tensor, file: BinaryIO, path: Place) -> None:
    target = memoryview(memory.view(torch.uint8).numpy())  # type: ignore[arg-type]
    read = 0
    while read < len(target):
        count = file.readinto(target[read : read + 64 * MIB])  # type: ignore[attr-defined]
        if not count:
            raise ConfigError(refusal(path, "this file of the checkpoint ends too early"))
        read += count
