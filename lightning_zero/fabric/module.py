"""Defines the module that ``fabric.setup`` returns, inside Fabric's wrapper."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_zero.engine import Engine, engine_of


class ZeroModule(nn.Module):
    """Calls the user's ``module``, which is sharded in place. Fabric also calls marked forward methods through it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @property
    def engine(self) -> Engine:
        """Return the module's engine. Raise RuntimeError if the module was released."""
        engine = engine_of(self.module)
        if engine is None:
            raise RuntimeError("this module is not sharded any more (engine.release()). Call fabric.setup again.")
        return engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
