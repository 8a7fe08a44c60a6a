"""Precision of Fabric's steps: inputs, outputs, backward and loss scaling."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.engine import Engine
from lightning_zero.engine.torch_modes import outside_graphs
from lightning_zero.engine.units.describe import AUTOCAST_DTYPES
from lightning_zero.lightning_api import fabric
from lightning_zero.trainer.precision import PrecisionRow, to_dtype


class FabricPrecision(PrecisionRow, fabric.plugins.precision.Precision):
    """Precision plugin of :class:`~lightning_zero.ZeroFabricStrategy`, with the arguments of :class:`PrecisionRow`."""

    front: ClassVar = "Fabric"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.overflowed: dict[Optimizer, bool] = {}  # whether gradients overflowed; until the optimizer steps

    def convert_input(self, data: Any) -> Any:
        """Convert floating-point inputs to the precision's dtype, also under autocast, as Fabric does."""
        dtype = AUTOCAST_DTYPES.get(self.row, self._default_dtype)
        return data if dtype is None else to_dtype(data, dtype)

    def convert_output(self, data: Any) -> Any:
        keeps = self.row not in AUTOCAST_DTYPES and self._default_dtype is None
        return data if keeps else to_dtype(data, torch.get_default_dtype())

    @outside_graphs
    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward, and reduce all gradients before this returns. Collective."""
        engines: Sequence[Engine] = self.strategy.engines_of_backward(model)
        if self.scaler is not None:
            self._forget_left_out(engines)
            tensor = tensor * self.scaler.scale
        with contextlib.ExitStack() as scopes:
            for engine in engines:
                if self.scaler is not None:
                    engine.passes.reducer.set_loss_scale(self.scaler.scale)
                scopes.enter_context(engine.passes.backward_scope())
            super().backward(tensor, model, *args, **kwargs)

    def _forget_left_out(self, engines: Sequence[Engine]) -> None:
        """Before a backward, forget whether gradients of steps that were left out had overflowed. Collective.

        If old gradients were finite, this says nothing about the gradients of the next backward. If they had
        overflowed and this backward adds to them, the next step must be skipped. If users have cleared them, the scale
        is lowered as after a skipped step.
        """
        assert self.scaler is not None
        self.overflowed = {optimizer: True for optimizer, overflowed in self.overflowed.items() if overflowed}
        for optimizer in list(self.overflowed):
            engine: Engine = self.strategy.engine_of_optimizer(optimizer)
            if engine not in engines or engine.passes.reducer.unreduced:
                continue
            engine.passes.meet("a look at gradients of a step that was left out")
            places = map(engine.units.place_of, self.main_params(optimizer))
            if engine.passes.sharded_grads.total_norm(places).isfinite():
                del self.overflowed[optimizer]
                self.scaler.update(overflowed=True)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """With loss scaling, find out once per step whether gradients of ``optimizer`` overflowed, and divide the
        gradients that users see by the loss scale. Collective."""
        if self.scaler is not None and optimizer not in self.overflowed:
            engine: Engine = self.strategy.engine_of_optimizer(optimizer)
            params = self.main_params(optimizer)
            self.overflowed[optimizer] = engine.passes.sharded_grads.overflowed(map(engine.units.place_of, params))
            engine.passes.reducer.unscale(params)

    @outside_graphs
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step the optimizer. With loss scaling, all ranks skip it if gradients of any rank overflow. Collective."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        if "closure" in kwargs:  # as torch.amp.GradScaler
            raise RuntimeError(
                "optimizer.step(closure): expected no closure with loss scaling (precision='16-mixed'). Call "
                "fabric.backward, then optimizer.step(), or set precision='bf16-mixed'."
            )
        self.unscale_gradients(optimizer)
        overflowed = self.overflowed.pop(optimizer)
        result = None if overflowed else optimizer.step()
        self.scaler.update(overflowed=overflowed)
        return result
