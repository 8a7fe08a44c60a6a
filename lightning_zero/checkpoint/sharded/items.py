"""Find which parts of a checkpoint a rank writes, and copy shards to the host for a thread that writes the copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from lightning_zero.device.streams import Streams
from lightning_zero.engine.units.master_storage import FlatSlice, MasterStorage, ResidentStorage
from lightning_zero.engine.whole.values import Part, TensorParts, Unsharded
from lightning_zero.planning.boxes import Box, boxes, memory_order
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.tiers.pages import HOST, HostPages

Path = tuple[Any, ...]  # names and list indices, from the top of the checkpoint

T = TypeVar("T", bound=Any)


class Item(NamedTuple):
    """What a rank writes as one entry: a box of a tensor, or a value that is not a tensor (``dtype`` is None)."""

    keys: tuple[str, ...]  # several if tied parameters share the tensor
    paths: tuple[Path, ...]
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    box: Box
    order: tuple[int, ...]  # dimensions by falling stride
    source: Any  # a Part, a Tensor, or the value

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the tensor's part :attr:`box`; 0 for a value that is not a tensor."""
        return self.box.numel * self.dtype.itemsize if self.dtype is not None else 0

    @property
    def storage(self) -> MasterStorage | None:
        """Return the storage that holds the values; None if they are in no :class:`MasterStorage`. While :meth:`tensor`
        is called and its result is used, the storage must be accessible (``with opened(storage)``)."""
        return self.source.storage if isinstance(self.source, Part) else None

    @property
    def slice(self) -> FlatSlice | None:
        if not isinstance(self.source, Part):
            return None
        return self.source.source.part(self.box.start - self.source.start, self.box.numel)

    def tensor(self, snapshot: Snapshot | None = None) -> Tensor:
        """Return the values of the box, of shape ``box.sizes``: the current values or, with ``snapshot``, those at the
        time when the snapshot was made. Only for items that are tensors."""
        if not isinstance(self.source, Part):
            return self.source.whole() if isinstance(self.source, StoredTensor) else cast(Tensor, self.source)
        if snapshot is not None and self.storage is not None and self.slice is not None:
            flat = snapshot.read(self.slice)
        else:
            flat = self.source.source.tensor[self.box.start - self.source.start :][: self.box.numel]
        return unflattened(flat, self.box.sizes, self.order)


class Entry(NamedTuple):
    """Describes an :class:`Item` that was written, and where: ``length`` bytes of ``file`` from byte ``start`` on."""

    keys: tuple[str, ...]
    paths: tuple[Path, ...]
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


def unflattened(flat: Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """View ``flat`` [numel] as a tensor of shape ``sizes``. ``order``: the dimensions by decreasing stride."""
    return flat.view([sizes[d] for d in order]).permute([order.index(d) for d in range(len(sizes))])


def items_of(state: Mapping[str, Any], rank: int) -> list[Item]:
    """Return the items of the nested ``state`` that ``rank`` writes, grouped by storage. Every rank writes its parts of
    sharded tensors and its :class:`Unsharded` values; rank 0 also writes all other values."""
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state))
    names: dict[Any, list[str]] = {}  # by tensor that they share
    for key, value in planner.state_dict.items():
        names.setdefault(id(value) if isinstance(value, Tensor) else key, []).append(key)
    found: list[Item] = []
    for keys in names.values():
        value, paths = planner.state_dict[keys[0]], tuple(planner.mappings[key] for key in keys)
        found += _items(tuple(keys), paths, value, rank)
    return by_home(found)


def by_home(items: Sequence[T]) -> list[T]:
    """Return ``items`` sorted so that items with the same ``storage`` are adjacent."""
    places: dict[int, int] = {}
    for item in items:
        places.setdefault(id(item.storage), len(places))
    return sorted(items, key=lambda item: places[id(item.storage)])


def _items(keys: tuple[str, ...], paths: tuple[Path, ...], value: Any, rank: int) -> Iterator[Item]:
    if isinstance(value, TensorParts):
        shape, order = tuple(value.shape), tuple(value.order)
        split = value.of_whole
        for part in value.parts:
            stop = part.start + part.source.numel
            if split is None:
                for box in boxes(shape, part.start, stop, order):
                    yield Item(keys, paths, value.dtype, shape, box, order, part)
                continue
            for box, start in split.boxes(part.start, stop):
                own = part._replace(start=box.start, source=part.source.part(start - part.start, box.numel))
                yield Item(keys, paths, value.dtype, shape, box, order, own)
        if not value.numel() and rank == 0:
            yield _whole(keys, paths, torch.empty(shape, dtype=value.dtype))
    elif isinstance(value, Unsharded) or rank == 0:
        value = value.value if isinstance(value, Unsharded) else value
        if isinstance(value, Tensor):
            yield _whole(keys, paths, value.detach())
        else:
            yield Item(keys, paths, None, (), Box((), (), 0), (), value)


def _whole(keys: tuple[str, ...], paths: tuple[Path, ...], value: Tensor) -> Item:
    shape = tuple(value.shape)
    box = Box((0,) * len(shape), shape, 0)
    return Item(keys, paths, value.dtype, shape, box, memory_order(value.stride()), value)


class _Span:
    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self.start, self.stop = len(whole), 0
        self.pages: HostPages | None = None

    @property
    def values(self) -> Tensor:
        return self.whole[self.start : self.stop].detach()

    @property
    def copy(self) -> Tensor:
        assert self.pages is not None
        return self.pages.tensor(0, self.whole.dtype, self.values.numel()).view(self.values.shape)


class Snapshot:
    """Copies the slices in ``wanted`` (by storage) to the host, with the values that they have when this object is
    made. Values that user code can change are copied by the constructor, other values by :meth:`stage`.

    Writes to the storages wait until :meth:`stage` or :meth:`close` has run. ``spare``: host memory of the previous
    snapshot for reuse, because allocating new memory would double the time of a copy."""

    def __init__(
        self, wanted: Mapping[MasterStorage, Sequence[FlatSlice]], streams: Streams, spare: list[HostPages]
    ) -> None:
        self._streams, self._spare = streams, spare
        self._spans: dict[int, _Span] = {}
        for part in (part for parts in wanted.values() for part in parts):
            span = self._spans.setdefault(id(part.whole), _Span(part.whole))
            span.start, span.stop = min(span.start, part.start), max(span.stop, part.stop)
        self._copied: Future[None] = Future()
        try:
            for storage in wanted:
                if isinstance(storage, ResidentStorage) and storage.is_exposed and id(storage.master) in self._spans:
                    self._copy(self._spans[id(storage.master)])  # at once: user code may change them without notice
        except BaseException:
            self.close()  # pages must not be dropped while they are pinned
            raise
        self._made = streams.mark()  # after the kernels that computed the values
        for storage in wanted:
            storage.lend(self._copied)

    @staticmethod
    def nbytes(wanted: Mapping[MasterStorage, Sequence[FlatSlice]]) -> int:
        """Return about how many bytes of host memory a snapshot of the slices in ``wanted`` takes."""
        return sum(part.numel * part.whole.element_size() for parts in wanted.values() for part in parts)

    def stage(self) -> None:
        """Copy the remaining values to the host, wait for all copies, then let writes to the storages continue. Called
        by the thread that saves the values."""
        accelerator = self._streams.accelerator
        accelerator.bind_thread()
        with self._streams.on("d2h", after=self._made):
            for span in self._spans.values():
                if span.pages is None:
                    self._copy(span)
            arrived = self._streams.mark()
        accelerator.wait_on_host(arrived)
        self._copied.set_result(None)

    def _copy(self, span: _Span) -> None:
        # Not torch's pinned memory, which is rounded up to a power of two.
        accelerator = HOST if span.whole.device.type == "cpu" else self._streams.accelerator
        size = span.values.nbytes, accelerator
        fits = [place for place, pages in enumerate(self._spare) if (pages.nbytes, pages.accelerator) == size]
        span.pages = self._spare.pop(fits[0]) if fits else HostPages(*size)
        span.copy.copy_(span.values, non_blocking=True)

    def read(self, part: FlatSlice) -> Tensor:
        """Return the copied values of the slice ``part`` as a host tensor [numel], valid until :meth:`close`."""
        span = self._spans[id(part.whole)]
        return span.copy[part.start - span.start : part.stop - span.start]

    def close(self) -> None:
        """Let writes to the storages continue. Put this snapshot's host memory into the constructor's list ``spare``,
        and free the memory that was there. A second call does nothing."""
        if not self._copied.done():
            self._copied.set_result(None)
        if self._spans:
            for pages in self._spare:
                pages.close()
            self._spare[:] = [span.pages for span in self._spans.values() if span.pages is not None]
            self._spans = {}
