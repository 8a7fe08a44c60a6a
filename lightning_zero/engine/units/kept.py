"""A slice of a flat tensor that a home holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.optimizers.low_bits import Format
from lightning_zero.planning.state_dtype import BLOCK


class Sliced(NamedTuple):
    """Adjacent elements of a flat tensor in a home, such as those of a fragment. The tensor may rest in a file.

    With a `packed` format, `whole` has a row for each block of elements (optimizers/low_bits.py).
    """

    whole: Tensor
    start: int
    numel: int
    packed: Format | None = None

    @property
    def tensor(self) -> Tensor:
        """The values [numel]. The home must be open."""
        low, high = self.rows
        return self.of(self.whole[low:high])

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype if self.packed is None else torch.bfloat16

    @property
    def rows(self) -> tuple[int, int]:
        """Range of the first dimension of `whole` that holds the elements."""
        if self.packed is None:
            return self.start, self.start + self.numel
        return self.start // BLOCK, -(-(self.start + self.numel) // BLOCK)

    def of(self, rows: Tensor) -> Tensor:
        """Unpack the values [numel] from a copy of `rows`."""
        if self.packed is None:
            return rows
        first = self.start % BLOCK
        return self.packed.values(rows)[first : first + self.numel]

    def part(self, start: int, numel: int) -> Sliced:
        return self._replace(start=self.start + start, numel=numel)
