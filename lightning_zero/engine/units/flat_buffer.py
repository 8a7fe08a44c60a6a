"""Flat buffers whose memory is freed and taken again under the same storage object, placeholders, and node shards.

`untyped_storage().resize_(0)` keeps autograd right: views of weights that it saved (`weight.t()` in a linear layer)
hold the storage object, not its memory.

On CUDA the memory belongs to the gather stream's pool; `comm/streams.py` says who waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.engine.units.param import ParamInfo


class FlatBuffer:
    """One flat tensor `data` [numel], readable only while `allocated`."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        # A tensor made under inference mode can never be used in training.
        with torch.inference_mode(False):
            self.data = torch.empty(numel, dtype=dtype, device=device)
        self.nbytes = self.data.numel() * self.data.element_size()

    def renew(self) -> None:
        """Take a new storage, and leave the old one with its memory to whoever holds it. Views must be made again."""
        with torch.inference_mode(False):
            self.data = torch.empty_like(self.data)

    @property
    def allocated(self) -> bool:
        return self.data.untyped_storage().nbytes() == self.nbytes

    def allocate(self) -> None:
        """Take memory with undefined contents, unless the buffer has memory. All views get it too."""
        if not self.allocated:
            self.data.untyped_storage().resize_(self.nbytes)

    def release(self) -> None:
        """Free the memory, unless NumPy has a view of it (`weight.numpy()`)."""
        storage = self.data.untyped_storage()
        # `resize_`, because views that autograd saved hold this storage object.
        if storage.resizable():
            storage.resize_(0)

    def view(self, start: int, shape: torch.Size, strides: Sequence[int]) -> Tensor:
        """View `shape` at element `start`. The view survives `release` and `allocate`."""
        if self.allocated:
            return self.data.as_strided(shape, strides, start)
        raise RuntimeError("views are made while the buffer has memory")


def placeholders(shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Make a placeholder for each shape: one NaN element, expanded. All elements share one small vector."""
    with torch.inference_mode(False):  # a tensor made under inference mode can never be used in training
        cells = torch.full((max(len(shapes), 1),), float("nan"), dtype=dtype, device=device)
        return [cells[index].expand(shape) for index, shape in enumerate(shapes)]


class NodeShard:
    """The slice of a bucket's gathered values that a rank keeps for its node under `hybrid_shard=node_backward`.

    ::

        full    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |    shards of eight ranks, on two nodes
        kept    |   0   |   1   |   2   |   3   |    slices of the four ranks of each node

    `values` [numel / ranks of the node] are kept from the unit's drop in the forward until the pass ends or masters
    change; else they are None. The gather for the backward takes them.
    """

    def __init__(self, numel: int, rank: int, size: int) -> None:
        """`rank` is this rank's position in its node, of `size` ranks. With size 0 nothing is ever kept."""
        each = numel // size if size else 0
        self._range = slice(rank * each, (rank + 1) * each)
        self.values: Tensor | None = None

    def of(self, full: Tensor) -> Tensor:
        return full[self._range]

    def keep(self, full: Tensor) -> None:
        """Keep this rank's slice of the gathered values `full` [numel], until :meth:`forget`."""
        with torch.inference_mode(False):
            self.values = self.of(full).clone()

    def put_into(self, full: Tensor) -> None:
        assert self.values is not None, "nothing was kept"
        self.of(full).copy_(self.values)

    def becomes(self, full: Tensor) -> None:
        """Update the kept slice, if any, from the changed values `full` [numel]."""
        if self.values is not None:
            self.values.copy_(self.of(full))

    def write(self, info: ParamInfo, start: int, value: Tensor) -> None:
        """Write one parameter, whose place in the bucket begins at `start`, to the kept slice."""
        first, last = max(self._range.start, start), min(self._range.stop, start + info.numel)
        if self.values is not None and first < last:
            low = self._range.start
            info.copy_part(value, first - start, self.values[first - low : last - low])

    def forget(self) -> None:
        self.values = None
