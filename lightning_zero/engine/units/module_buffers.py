"""Replicates buffers (running statistics) with rank 0's values: when a module is sharded, and before steps.

DDP does the same. In between buffers may differ, because ranks compute with different batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_zero.comm.communicator import Communicator


def replicate_buffers(module: nn.Module, comm: Communicator, dtype: torch.dtype | None) -> None:
    """Move all buffers to the engine's device, with rank 0's values; those that modules share stay shared.

    Args:
        dtype: of floating-point buffers; None: their own.
    """
    moved: dict[int, Any] = {}
    for inner in module.modules():
        for key, buffer in inner._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                wanted = dtype if buffer.is_floating_point() else None
                moved[id(buffer)] = on_device = buffer.to(comm.device, wanted)
                if buffer.numel():
                    data = on_device.contiguous()
                    comm.broadcast(data)
                    if any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)):
                        moved[id(buffer)] = data  # an expanded buffer cannot be written to
                    else:
                        on_device.copy_(data)
            inner._buffers[key] = moved[id(buffer)]


class BufferSync:
    """Finds out whether the buffers of a module have changed on any rank, and sends rank 0's if so."""

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        self._comm = comm
        self._seen = self._now(module)

    @staticmethod
    def _now(module: nn.Module) -> list[tuple[Tensor, int]]:
        """All buffers with their versions. A write in place raises a version; an inference tensor has none."""
        return [(b, -1 if b.is_inference() else b._version) for b in module.buffers() if b.numel()]

    def sync(self, module: nn.Module) -> None:
        """Send rank 0's buffers to all ranks, if they have changed on any rank. On all ranks.

        Without buffers it costs nothing, with unchanged ones a small agreement.
        """
        now = self._now(module)
        if not now or self._comm.world_size == 1:
            return
        same = len(now) == len(self._seen) and all(
            b is old and version == before != -1 for (b, version), (old, before) in zip(now, self._seen, strict=True)
        )
        # Agreed on: a rank whose own buffers have changed must not broadcast alone, the others would not come.
        if self._comm.max_(torch.tensor([not same], dtype=torch.uint8)).item():
            for dtype in sorted({b.dtype for b, _ in now}, key=str):
                self._send([b for b, _ in now if b.dtype == dtype])
        self._seen = self._now(module)

    def _send(self, buffers: list[Tensor]) -> None:
        flat = torch.cat([b.detach().reshape(-1) for b in buffers])
        self._comm.broadcast(flat, among="reduce")  # not among the gathers that a step has left in flight
        if self._comm.rank == 0:
            increment_version(buffers)  # a graph that has saved them is refused on all ranks, or on none
        else:
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))
