"""Precision of the Trainer's steps: backward, loss scaling, clipping, and what stands in the way of early steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.config import ConfigError, OffloadConfig
from lightning_zero.engine import Engine
from lightning_zero.engine.torch_modes import outside_graphs
from lightning_zero.engine.whole import norms
from lightning_zero.trainer.precision_row import PrecisionRow


class ZeroPrecision(PrecisionRow, LightningPrecision):
    """Precision of :class:`~lightning_zero.ZeroStrategy`. The strategy makes it from ``Trainer(precision=)``.

    Its arguments are those of :class:`PrecisionRow`.
    """

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        if self.scaler is not None:
            tensor = tensor * self.scaler.scale
        return super().pre_backward(tensor, module)

    @outside_graphs
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Reduction ends inside, so that ``on_after_backward`` finds finished gradients."""
        engine = self.strategy.engine
        if self.scaler is not None:
            engine.reducer.set_loss_scale(self.scaler.scale)
        with engine.backward_scope():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @outside_graphs
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """As Lightning's mixed precision does it: a step whose gradients overflowed on any rank is skipped by all."""
        if self.scaler is None:
            engine = self.strategy.engine
            self.check_early_steps(model.trainer)  # a setting of the Trainer's may have changed since the start
            asked = engine.config.offload.step_in_backward
            with engine.stepping_in_backward() if asked else contextlib.nullcontext():
                return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # training_step returned None: there was no backward
            self._after_closure(model, optimizer)
            return result
        overflowed = norms.overflowed(self.strategy.engine, self.main_params(optimizer))
        self.strategy.engine.reducer.unscale(self.main_params(optimizer))
        self._after_closure(model, optimizer)
        if not overflowed:
            optimizer.step(**kwargs)
        self.scaler.update(overflowed=overflowed)
        return result

    def check_early_steps(self, trainer: pl.Trainer, later: OffloadConfig | None = None) -> None:
        """
        Args:
            later: settings that the engine is to have.

        Raises:
            ConfigError: ``zero.offload.step_in_backward`` is set, and this run cannot step inside the backward.
        """
        engine = self.strategy.engine
        if not (later or engine.config.offload).step_in_backward:
            return
        found = self._in_the_way(trainer) or _never_early(engine, moves=later is not None)
        if found is not None:
            why, change = found
            raise ConfigError(
                f"zero.offload.step_in_backward: expected false ({why}), got true. {change}, or drop "
                "zero.offload.step_in_backward."
            )

    def _in_the_way(self, trainer: pl.Trainer) -> tuple[str, str] | None:
        """What runs between a gradient and its step, and what to change; None where gradients go straight into it."""
        if not trainer.lightning_module.automatic_optimization:
            # Also the only one in which Lightning allows several optimizers.
            return "manual optimization may look at gradients before the step", "Use automatic optimization"
        if self.scaler is not None:
            return "loss scaling looks at all gradients before the step", "Choose zero/precision=bf16"
        if trainer.gradient_clip_val:
            return "clipping looks at all gradients before the step", "Set trainer.gradient_clip_val=null"
        hooks: list[tuple[Any, type]] = [(trainer.lightning_module, pl.LightningModule)]
        hooks += [(callback, pl.Callback) for callback in trainer.callbacks]  # type: ignore[attr-defined]
        for owner, base in hooks:
            for name in _BETWEEN:
                if _overrides(owner, base, name):
                    hook = f"{type(owner).__qualname__}.{name}"
                    return f"{hook} may look at gradients before the step", f"Drop {hook}"
        return None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load scaler state that DDP or FSDP has saved, under the names of their plugins."""
        for name in ("MixedPrecision", "FSDPPrecision"):
            self.load_state_dict(checkpoint.get(name) or {})

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        norms.clip_by_norm(self.strategy.engine, list(self.main_params(optimizer)), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        norms.clip_by_value(self.strategy.engine, self.main_params(optimizer), clip_val)


# What runs between a parameter's gradient and its step; a user's own may look at gradients, or change them.
_BETWEEN = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "backward",
)


def _never_early(engine: Engine, *, moves: bool = False) -> tuple[str, str] | None:
    """Why no bucket would be stepped inside the backward, and what to change.

    Args:
        moves: what rests where now does not count.
    """
    if any(optimizer.never_early for optimizer in engine.optimizers):
        why = "the optimizer has a step of its own, or hooks before its step"
        return why, "Use an optimizer of torch's, and no register_step_pre_hook"
    if not moves and not any(bucket.trainable and bucket.plan.may_step_in_backward for bucket in engine.buckets):
        return "no optimizer state of this run rests on the host", "Choose zero/offload=optimizer_cpu"
    return None


def _overrides(owner: Any, base: type, name: str) -> bool:
    own, inherited = getattr(owner, name, None), getattr(base, name, None)
    return own is not None and getattr(own, "__func__", own) is not inherited
