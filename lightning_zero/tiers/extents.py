"""Where masters, optimizer state, gradients and parameters rest off the device: host memory, or a file.

A caller reserves extents once: a batch of them is one slab, or one region of the file. Values in host memory are
computed on where they are (``HostTier.resident``); values in files move by ``NvmeTier.stage_in`` and ``stage_out``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.planning.layout import round_up


class Wanted(NamedTuple):
    """An extent to reserve."""

    label: str  # unit and role, for error messages
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """A place for ``numel`` elements on one tier. Extents are told apart by identity."""

    label: str
    numel: int
    dtype: torch.dtype
    offset: int  # bytes, in its slab or file

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without the padding behind them."""
        return self.numel * self.dtype.itemsize

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError where ``tensor`` cannot be staged to or from here."""
        fits = tensor.dtype is self.dtype and tensor.numel() == self.numel and tensor.device.type == "cpu"
        if not fits or not tensor.is_contiguous():
            raise ValueError(
                f"{self.label!r}: expected a contiguous tensor of {self.numel} elements of {self.dtype} on the host, "
                f"got {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )


def lay_out(wanted: Sequence[Wanted], base: int, align: int) -> tuple[list[Extent], int]:
    """Place extents one behind the other from byte ``base`` on, each at a multiple of ``align``.

    Returns:
        The extents, and the bytes that they take.
    """
    extents, total = [], 0
    for label, numel, dtype in wanted:
        extents.append(Extent(label, numel, dtype, base + total))
        total += round_up(numel * dtype.itemsize, align)
    return extents, total
