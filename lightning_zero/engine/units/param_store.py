"""The memory of a bucket's compute parameters: the full buffer, slices kept for the node, and shards between uses.

[Note: freed storage and autograd's views]
Views of weights that autograd saves (`weight.t()` in a linear layer) refer to the storage object of a buffer, not its
memory. So a :class:`FlatBuffer` keeps the storage object, and frees and allocates memory by
`untyped_storage().resize_`: the views are valid again after the next gather. Before that, a read of a view raises an
error or crashes the process. On CUDA the memory belongs to the gather stream's pool: see `device/streams.py`.

Between uses a :class:`ParamStore` holds the parameters. Its class depends on ``BucketPlan.params_rest``::

                     prepare: before a gather          update: after a step
    FullIsMaster     nothing                           nothing
    FullCopy         nothing                           storage -> own slice of the full buffer
    InMasterStorage  storage -> own slice, cast        nothing
    DeviceShard      shard -> own slice                storage -> shard, cast
    FileShard        file -> own slice                 storage -> file, cast
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from lightning_zero.device import recording
from lightning_zero.device.accelerator import Event
from lightning_zero.device.streams import Streams
from lightning_zero.engine.units.master_storage import MasterStorage, Tiers
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.planning.topology import Group
from lightning_zero.tiers.extents import Wanted


class FlatBuffer:
    """A flat tensor `data` [numel] whose memory can be freed and allocated again. Read `data` only if `allocated`."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        # A tensor made under inference mode can never be used in training.
        with torch.inference_mode(False):
            self.data = torch.empty(numel, dtype=dtype, device=device)
        self.nbytes = self.data.numel() * self.data.element_size()
        self.is_lent = False  # users hold views of the values, which must not be freed

    @property
    def allocated(self) -> bool:
        return self.data.untyped_storage().nbytes() == self.nbytes

    def allocate(self) -> None:
        """Allocate uninitialized memory if the buffer has none. Existing views of `data` refer to the new memory."""
        storage = self.data.untyped_storage()
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)

    def release(self) -> None:
        """Free the memory, unless a NumPy array (`weight.numpy()`) or a user's view (`is_lent`) shares the memory."""
        storage = self.data.untyped_storage()
        if storage.resizable() and not self.is_lent:
            storage.resize_(0)
        self.is_lent = False


def references(tensor: Tensor) -> int:
    """Return how many tensors share the storage of ``tensor``, including ``tensor`` and those saved by autograd."""
    # Without the storage object that is made here.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # type: ignore[attr-defined,no-any-return]


def placeholders(shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return for each shape a tensor of one NaN (0 for integer dtypes), expanded to the shape: the `.data` of a
    parameter while its values are not gathered. All share one small tensor. See [Note: placeholders]."""
    with torch.inference_mode(False):  # a tensor made under inference mode can never be used in training
        value = float("nan") if dtype.is_floating_point else 0
        cells = torch.full((max(len(shapes), 1),), value, dtype=dtype, device=device)
        return [cells[index].expand(shape) for index, shape in enumerate(shapes)]


class NodeShard:
    """The slice of a bucket's gathered values that a rank keeps for its node under `hybrid_shard=node_backward`.

    ::

        full    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |    shards of eight ranks, on two nodes
        kept    |   0   |   1   |   2   |   3   |    slices of the four ranks of each node

    `values` [numel / ranks of the node]: the slice, from the drop of the unit in the forward until the pass ends or
    masters change; None at other times. The gather for the backward sends these slices instead of the shards.
    """

    def __init__(self, numel: int, node: Group) -> None:
        """`node`: the ranks of this node (size 0: no slice is kept). `numel`: elements of the bucket."""
        each = numel // node.size if node.size else 0
        self._range = slice(node.index * each, (node.index + 1) * each)
        self.values: Tensor | None = None

    def keep_slice(self, full: Tensor) -> None:
        """Keep this rank's slice of the gathered values `full` [numel], until `values` is set to None."""
        with torch.inference_mode(False):
            self.values = full[self._range].clone()

    def copy_to(self, full: Tensor) -> None:
        assert self.values is not None, "nothing was kept"
        full[self._range].copy_(self.values)

    def update(self, full: Tensor) -> None:
        """If this rank keeps a slice, update the slice from `full` [numel], the bucket's changed values."""
        if self.values is not None:
            self.values.copy_(full[self._range])

    def write(self, info: ParamInfo, start: int, value: Tensor) -> None:
        """Write `value`, a whole parameter that begins at element `start` of the bucket, to the kept slice, if any."""
        first, last = max(self._range.start, start), min(self._range.stop, start + info.numel)
        if self.values is not None and first < last:
            low = self._range.start
            info.copy_part(value, first - start, self.values[first - low : last - low])


class ParamStore:
    """Holds this rank's part of a bucket's compute parameters while they are not gathered: [owned numel], the elements
    whose masters this rank steps. `memory`: the device tensor that the store has allocated; None if the parameters are
    in another object's memory or in a file."""

    memory: Tensor | None = None

    def stage_ahead(self) -> None:
        """If the parameters are in files, start to read the files, before a gather needs the values. Does not wait."""

    def prepare(self, own: Tensor) -> None:
        """Fill `own`, this rank's slice of the full buffer, before a gather."""
        self.read(own)

    def read(self, target: Tensor) -> None:
        """Copy this rank's compute parameters to `target` [owned numel], in the dtype of `target`."""
        raise NotImplementedError

    def update(self, master: Tensor) -> None:
        """After a step, update the stored parameters from `master` [owned numel], whose storage must be open."""

    def wait_for_rest(self) -> None:
        """Wait until the last update of parameters in a file is written. Raise the error of a failed write."""

    def free(self) -> None:
        """Free the store's memory or file space. The store cannot be used afterwards."""


class InMasterStorage(ParamStore):
    """Stores nothing. Each gather copies this rank's masters to the full buffer, with a cast to the compute dtype."""

    def __init__(self, storage: MasterStorage) -> None:
        self._storage = storage

    def stage_ahead(self) -> None:
        self._storage.begin_open()

    def read(self, target: Tensor) -> None:
        self._storage.copy_to(target)


class FullIsMaster(InMasterStorage):
    def prepare(self, own: Tensor) -> None:
        """Do nothing: this rank's slice `own` of the full buffer is always up to date."""


class FullCopy(FullIsMaster):
    """For a full buffer that stays gathered: `update` writes the stepped masters to this rank's slice `own` of it.
    `read` casts from the masters and not from the buffer, which users may have written to."""

    def __init__(self, storage: MasterStorage, own: Tensor, send: Callable[[Tensor], None]) -> None:
        super().__init__(storage)
        self._own, self._send = own, send

    def update(self, master: Tensor) -> None:
        self._send(self._own)


class DeviceShard(ParamStore):
    memory: Tensor

    def __init__(self, values: Tensor, send: Callable[[Tensor], None]) -> None:
        self.memory, self._send = values, send

    def read(self, target: Tensor) -> None:
        target.copy_(self.memory)

    def update(self, master: Tensor) -> None:
        self._send(self.memory)


class FileShard(ParamStore):
    def __init__(self, tiers: Tiers, storage: MasterStorage, streams: Streams, label: str, values: Tensor) -> None:
        assert tiers.nvme is not None and tiers.read_ahead is not None
        self._tier, self._read_ahead, self._storage, self._streams = tiers.nvme, tiers.read_ahead, storage, streams
        self._extent = self._tier.reserve([Wanted(f"{label} (parameters)", values.numel(), values.dtype)])[0]
        self._staged: Tensor | None = None
        self._give_back: Callable[[Event], None] | None = None
        self._reading: Future[None] | None = None
        self._writing = self._tier.stage_out(self._extent, values)
        self._writing.result()  # the caller goes on to use the memory of `values`

    def stage_ahead(self) -> None:
        if self._reading is None:
            self._staged, self._give_back = self._read_ahead.take_buffer(self._extent.dtype, self._extent.numel)
            self._reading = self._tier.stage_in(self._extent, self._staged)

    def read(self, target: Tensor) -> None:
        self.stage_ahead()
        assert self._reading is not None and self._staged is not None
        with recording.waiting("disk", self._extent.label, on_host=True):
            self._reading.result()
        target.copy_(self._staged, non_blocking=True)
        self._drop()

    def update(self, master: Tensor) -> None:
        self._drop()  # values that were read ahead are stale now
        value = master.to("cpu", self._extent.dtype)
        self._writing = self._tier.write_behind(self._extent, value)
        if value is master:  # not converted: the next step must wait for the write before it changes the master
            self._storage.lend(self._writing)

    def wait_for_rest(self) -> None:
        self._writing.result()

    def free(self) -> None:
        self._drop()
        self._tier.free([self._extent])

    def _drop(self) -> None:
        """Wait for a read-ahead of the file, if any, and return its buffer to the pool. Later reads read the file."""
        if self._reading is not None:
            # `exception` waits without raising: the tier's threads write to the staged memory until then.
            self._reading.exception()
        if self._give_back is not None:
            self._give_back(self._streams.mark())
        self._reading, self._staged, self._give_back = None, None, None
