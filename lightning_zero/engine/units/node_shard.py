"""What a rank keeps of a bucket's gathered values for its node: ``zero.comm.hierarchy=node_backward``.

::

    full    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |    shards of eight ranks, on two nodes
    kept    |   0   |   1   |   2   |   3   |    slices of the four ranks of each node

From a unit's forward, when its values are dropped, to the gather for the backward, which takes these slices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.engine.units.param import ParamInfo


class NodeShard:
    """The slice of this rank.

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
