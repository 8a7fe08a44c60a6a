"""Flat buffers whose memory comes and goes under the same storage object, and placeholders with a guard.

Freeing by ``untyped_storage().resize_(0)`` and refilling in place is what keeps autograd right: it saves *views* of
weights (``weight.t()`` in a linear layer), and these hold the storage object, not its memory.

On CUDA memory is taken and dropped on the compute stream; ``collectives.py`` orders its streams behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor


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

    @property
    def allocated(self) -> bool:
        return self.data.untyped_storage().nbytes() == self.nbytes

    def allocate(self) -> None:
        if not self.allocated:
            self.data.untyped_storage().resize_(self.nbytes)

    def release(self) -> None:
        self.data.untyped_storage().resize_(0)

    def view(self, start: int, shape: torch.Size) -> Tensor:
        """A view of ``shape`` at element ``start``. It stays valid when memory is released and taken again."""
        if self.allocated:
            return self.data[start : start + shape.numel()].view(shape)
        raise RuntimeError("views are made while the buffer has memory")


class Guard:
    """Placeholders for parameters that are not gathered: NaN, expanded to the parameter's shape.

    All placeholders share one vector with an element each. A write that gets through to one (``zero_`` and ``fill_``
    do; ``copy_`` is refused by torch) leaves a number where NaN was: :meth:`written` finds it.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._cells = torch.full((max(count, 1),), float("nan"), dtype=dtype, device=device)

    def placeholder(self, index: int, shape: torch.Size) -> Tensor:
        return self._cells[index].expand(shape)

    def touched(self) -> Tensor:
        """A 0-d bool tensor on the device: whether any placeholder was written to."""
        return torch.logical_not(torch.isnan(self._cells).all())

    def written(self) -> list[int]:
        """Indices of the placeholders that were written to. Restores them."""
        indices: list[int] = torch.nonzero(torch.logical_not(torch.isnan(self._cells))).flatten().tolist()
        self._cells.fill_(float("nan"))
        return indices
