"""Defines the module that ``fabric.setup`` returns, inside Fabric's wrapper."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.torch_modes import outside_graphs


class ZeroModule(nn.Module):
    """Calls the user's ``module``, which is sharded in place. Fabric also calls marked forward methods through it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._buffers_may_differ = False

    @property
    def engine(self) -> Engine:
        """Return the module's engine. Raise RuntimeError if the module was released."""
        engine = engine_of(self.module)
        if engine is None:
            raise RuntimeError("this module is not sharded any more (engine.release()). Call fabric.setup again.")
        return engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._sync_buffers()
        return self.module(*args, **kwargs)

    @outside_graphs
    def _sync_buffers(self) -> None:
        """Send rank 0's buffers to all ranks, as DDP does, if training may have changed buffers. Collective."""
        trains = self.training and torch.is_grad_enabled()
        if trains or self._buffers_may_differ:
            self.engine.passes.buffers.sync(evaluates=not trains)
        self._buffers_may_differ = trains
