"""What stands for a module that ``fabric.setup`` has sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.torch_modes import outside_graphs


class ZeroModule(nn.Module):
    """Calls the module, which is sharded in place. Fabric sends what a user has marked as a forward method through it.

    Attributes:
        module: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._buffers_may_differ = False

    @property
    def engine(self) -> Engine:
        """
        Raises:
            RuntimeError: the module was released.
        """
        engine = engine_of(self.module)
        if engine is None:
            raise RuntimeError("this module is not sharded any more (engine.release()). Call fabric.setup again.")
        return engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._sync_buffers()
        return self.module(*args, **kwargs)

    @outside_graphs
    def _sync_buffers(self) -> None:
        """As DDP does: ranks compute with rank 0's, which batches of training have changed. In evaluation nothing does,
        and ranks may have more batches or fewer."""
        trains = self.training and torch.is_grad_enabled()
        if trains or self._buffers_may_differ:
            self.engine.sync_buffers()
        self._buffers_may_differ = trains
