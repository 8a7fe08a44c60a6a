"""Extents: the space of masters, optimizer state, gradients and parameters in host memory or a file. A caller reserves
many extents at once, as one slab of memory or one region of the file. Values in host memory are used in place
(``HostTier.resident``); values in files are copied by ``NvmeTier.stage_in`` and ``stage_out``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.planning.layout import round_up


class Wanted(NamedTuple):
    label: str
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """The space of one tensor of ``numel`` elements on a tier. Extents compare by identity."""

    label: str
    numel: int
    dtype: torch.dtype
    offset: int  # bytes, in its slab or file

    @property
    def nbytes(self) -> int:
        """Return the bytes of the values, without padding."""
        return self.numel * self.dtype.itemsize

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError unless ``tensor`` is a contiguous host tensor with this extent's dtype and numel."""
        fits = tensor.dtype is self.dtype and tensor.numel() == self.numel and tensor.device.type == "cpu"
        if not fits or not tensor.is_contiguous():
            raise ValueError(
                f"{self.label!r}: expected a contiguous tensor of {self.numel} elements of {self.dtype} on the host, "
                f"got {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )


def lay_out(wanted: Sequence[Wanted], base: int, align: int) -> tuple[list[Extent], int]:
    """Return extents for ``wanted`` from byte ``base`` on, padded to multiples of ``align``, and their total bytes."""
    extents, total = [], 0
    for label, numel, dtype in wanted:
        extents.append(Extent(label, numel, dtype, base + total))
        total += round_up(numel * dtype.itemsize, align)
    return extents, total
