"""Flat buffers whose memory comes and goes under the same storage object, and placeholders for values that are gone.

Freeing by ``untyped_storage().resize_(0)`` and refilling in place is what keeps autograd right: it saves *views* of
weights (``weight.t()`` in a linear layer), and these hold the storage object, not its memory.

On CUDA memory that comes and goes is of the gather stream's pool; ``comm/streams.py`` says who waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence

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
