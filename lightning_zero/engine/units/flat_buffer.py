"""Flat buffers whose memory comes and goes under the same storage object, and placeholders for values that are gone.

Freeing by ``untyped_storage().resize_(0)`` and refilling in place is what keeps autograd right: it saves *views* of
weights (``weight.t()`` in a linear layer), and these hold the storage object, not its memory.

On CUDA memory that comes and goes is of the gather stream's pool; ``comm/streams.py`` says who waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.engine.units.param import ParamInfo


class FlatBuffer:
    """One flat tensor [numel] whose memory can be released and taken again.

    Attributes:
        data: the tensor; readable only while ``allocated``.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        # A tensor made under inference mode could never be used in training again.
        with torch.inference_mode(False):
            self.data = torch.empty(numel, dtype=dtype, device=device)
        self.nbytes = self.data.numel() * self.data.element_size()

    def renew(self) -> None:
        """Take another storage, and leave the old one with its memory to whoever holds it; views are made again."""
        with torch.inference_mode(False):
            self.data = torch.empty_like(self.data)

    @property
    def allocated(self) -> bool:
        return self.data.untyped_storage().nbytes() == self.nbytes

    def allocate(self) -> None:
        """Take memory, of any contents, if there is none. All views of the buffer have it then."""
        if not self.allocated:
            self.data.untyped_storage().resize_(self.nbytes)

    def release(self) -> None:
        """Let the memory go. Where NumPy has a view of it (``weight.numpy()``), it has to stay."""
        storage = self.data.untyped_storage()
        # ``resize_`` and not a new tensor: autograd has saved views that hold this very storage object.
        if storage.resizable():
            storage.resize_(0)

    def view(self, start: int, shape: torch.Size, strides: Sequence[int]) -> Tensor:
        """A view of ``shape`` at element ``start``. It stays valid when memory is released and taken again."""
        if self.allocated:
            return self.data.as_strided(shape, strides, start)
        raise RuntimeError("views are made while the buffer has memory")


def placeholders(shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Make a placeholder for each shape: one NaN element, expanded. The elements of all lie in one small vector."""
    with torch.inference_mode(False):  # a tensor made under inference mode could never be used in training again
        cells = torch.full((max(len(shapes), 1),), float("nan"), dtype=dtype, device=device)
        return [cells[index].expand(shape) for index, shape in enumerate(shapes)]


class NodeShard:
    """The slice that a rank keeps of a bucket's gathered values for its node: ``zero.comm.hybrid_shard=node_backward``.

    ::

        full    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |    shards of eight ranks, on two nodes
        kept    |   0   |   1   |   2   |   3   |    slices of the four ranks of each node

    From a unit's forward, when its values are dropped, to the gather for the backward, which takes these slices.

    Attributes:
        values: compute_param, [numel / ranks of the node]; None: none are kept now.
    """

    def __init__(self, numel: int, rank: int, size: int) -> None:
        """
        Args:
            numel: of the bucket.
            rank, size: the place of this rank among those of its node; a size of 0: nothing is ever kept.
        """
        each = numel // size if size else 0
        self._range = slice(rank * each, (rank + 1) * each)
        self.values: Tensor | None = None

    def of(self, full: Tensor) -> Tensor:
        """Its part of ``full`` [numel]."""
        return full[self._range]

    def keep(self, full: Tensor) -> None:
        """Keep its part of the gathered values ``full`` [numel], until :meth:`forget`."""
        with torch.inference_mode(False):
            self.values = self.of(full).clone()

    def put_into(self, full: Tensor) -> None:
        """Bring the values to their place in ``full`` [numel]."""
        assert self.values is not None, "nothing was kept"
        self.of(full).copy_(self.values)

    def becomes(self, full: Tensor) -> None:
        """Values have changed, if any are kept: ``full`` [numel] is what all ranks have now."""
        if self.values is not None:
            self.values.copy_(self.of(full))

    def write(self, info: ParamInfo, start: int, value: Tensor) -> None:
        """Set one parameter, whose place in the bucket begins at ``start``, in what is kept."""
        first, last = max(self._range.start, start), min(self._range.stop, start + info.numel)
        if self.values is not None and first < last:
            low = self._range.start
            info.copy_part(value, first - start, self.values[first - low : last - low])

    def forget(self) -> None:
        """Keep nothing any more. Who has read it is over, on the current stream."""
        self.values = None
