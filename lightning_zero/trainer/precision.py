"""Precision of the Trainer's steps: backward, loss scaling and clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.torch_modes import outside_graphs
from lightning_zero.engine.units.bucket import Place
from lightning_zero.lightning_api import pl
from lightning_zero.trainer.precision_row import PrecisionRow


class ZeroPrecision(PrecisionRow, pl.plugins.precision.Precision):
    """Precision plugin of :class:`~lightning_zero.ZeroStrategy`, with the arguments of :class:`PrecisionRow`."""

    batch_weight = 1.0  # factor of the loss of this rank's batch, set by zero.uneven=join

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        self.strategy._interruptions.not_finite.note(tensor)
        if self.batch_weight != 1.0:
            tensor = tensor * self.batch_weight
        if self.scaler is not None:
            tensor = tensor * self.scaler.scale
        return super().pre_backward(tensor, module)

    @outside_graphs
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward, and reduce all gradients before ``on_after_backward``. Collective."""
        engine = self.strategy.engine
        if self.scaler is not None:
            engine.passes.reducer.set_loss_scale(self.scaler.scale)
        with engine.passes.backward_scope():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @outside_graphs
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step the optimizer. With loss scaling, all ranks skip it if gradients of any rank overflow. Collective."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # training_step returned None: there was no backward
            self._after_closure(model, optimizer)
            return result
        engine = self.strategy.engine
        overflowed = engine.passes.sharded_grads.overflowed(self._places(optimizer))
        engine.passes.reducer.unscale(self.main_params(optimizer))
        self._after_closure(model, optimizer)
        if not overflowed:
            optimizer.step(**kwargs)
        self.scaler.update(overflowed=overflowed)
        return result

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the loss scaler's state also under the name by which DDP's precision plugin loads it."""
        if state := self.state_dict():
            checkpoint["MixedPrecision"] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the loss scaler's state from a checkpoint that DDP's or FSDP's precision plugin has saved."""
        for name in ("MixedPrecision", "FSDPPrecision"):
            self.load_state_dict(checkpoint.get(name) or {})

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        norm = self.strategy.engine.passes.sharded_grads.clip_by_norm(self._places(optimizer), clip_val)
        self.strategy._interruptions.not_finite.note(norm, is_norm=True)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self.strategy.engine.passes.sharded_grads.clip_by_value(self._places(optimizer), clip_val)

    def _places(self, optimizer: Optimizer) -> list[Place]:
        return [self.strategy.engine.units.place_of(param) for param in self.main_params(optimizer)]
