"""Buffers are replicated. Before a step rank 0's values go to all ranks, as DDP sends them: ranks see other batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_zero.memory.collectives import Communicator


class BufferSync:
    """Finds out whether the buffers of a module have changed on any rank, and sends rank 0's if so."""

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        self._comm = comm
        self._seen = self._now(module)

    @staticmethod
    def _now(module: nn.Module) -> list[tuple[Tensor, int]]:
        """All buffers with their versions, which writes in place raise (an inference tensor has none)."""
        return [(b, -1 if b.is_inference() else b._version) for b in module.buffers() if b.numel()]

    def sync(self, module: nn.Module) -> None:
        """On all ranks. Without buffers it costs nothing, with unchanged ones a small agreement."""
        now = self._now(module)
        if not now or self._comm.world_size == 1:
            return
        same = len(now) == len(self._seen) and all(
            b is old and version == before != -1 for (b, version), (old, before) in zip(now, self._seen, strict=True)
        )
        if self._comm.max_(torch.tensor([not same], dtype=torch.uint8)).item():
            for dtype in sorted({b.dtype for b, _ in now}, key=str):
                self._send([b for b, _ in now if b.dtype == dtype])
        self._seen = self._now(module)

    def _send(self, buffers: list[Tensor]) -> None:
        flat = torch.cat([b.detach().reshape(-1) for b in buffers])
        if flat.device.type == "cpu":
            self._comm.broadcast_small(flat)  # not in the queue of the gathers that a step has left in flight
        else:
            self._comm.broadcast(flat)
        if self._comm.rank != 0:
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))
