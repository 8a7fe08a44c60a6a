"""Lightning's side of precision: contexts, inputs and clipping. The dtypes of parameters are the engine's business."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Protocol
from weakref import ReferenceType, ref

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor, _DtypeContextManager
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.config import ConfigError, OffloadConfig, Precision
from lightning_zero.engine import Engine
from lightning_zero.engine.steps.loss_scale import LossScaler
from lightning_zero.engine.torch_modes import outside_graphs
from lightning_zero.engine.units.describe import AUTOCAST_DTYPES, TRUE_DTYPES
from lightning_zero.engine.whole import norms

FLAGS = [row.value for row in Precision]


class _Strategy(Protocol):
    """The part of :class:`~lightning_zero.ZeroStrategy` that is used here."""

    @property
    def engine(self) -> Engine: ...

    @property
    def root_device(self) -> torch.device: ...


class ZeroPrecision(LightningPrecision):
    """Precision of :class:`~lightning_zero.ZeroStrategy`. The strategy makes it from ``Trainer(precision=)``.

    Args:
        precision: ``32-true``, ``bf16-mixed``, ``16-mixed``, ``bf16-true``, ``16-true`` or ``64-true``.
        scaler: the loss scaling of ``16-mixed``; default: that of ``torch.amp.GradScaler``.

    Raises:
        ConfigError: another precision.
    """

    def __init__(self, precision: str = "32-true", scaler: LossScaler | None = None) -> None:
        if precision not in FLAGS:
            raise ConfigError(
                f"trainer.precision: expected one of {', '.join(FLAGS)} with a ZeRO strategy, got {precision!r}. "
                f"Change Trainer(precision=) or zero/precision ({', '.join(Precision.__members__)})."
            )
        self.precision = precision  # type: ignore[assignment]
        if scaler is not None and self.row is not Precision.fp16:
            raise ConfigError(f"a loss scaler has no effect with precision {precision!r}. Drop it, or use 16-mixed.")
        self.scaler = scaler or (LossScaler() if self.row is Precision.fp16 else None)
        self._strategy: ReferenceType[_Strategy] | None = None

    @property
    def row(self) -> Precision:
        return Precision(self.precision)

    @classmethod
    def from_plugin(cls, plugin: LightningPrecision) -> ZeroPrecision:
        """Ours in place of the plugin that Lightning chose or a user gave."""
        if isinstance(plugin, cls):
            return plugin
        known = {"Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision", "FSDPPrecision"}
        if type(plugin).__name__ not in known:
            raise ConfigError(
                f"the precision plugin {type(plugin).__name__} cannot be used with a ZeRO strategy. Drop it and set "
                f"Trainer(precision=) to one of {', '.join(FLAGS)}."
            )
        given = getattr(plugin, "scaler", None)
        return cls(str(plugin.precision), None if given is None else LossScaler.like(given))

    def attach(self, strategy: _Strategy) -> None:
        self._strategy = ref(strategy)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_strategy": None}  # a copied strategy attaches its copy of this

    @property
    def strategy(self) -> _Strategy:
        strategy = self._strategy() if self._strategy is not None else None
        if strategy is None:
            raise ConfigError(
                "ZeroPrecision works with ZeroStrategy only. Use Trainer(strategy='zero3', precision=...)."
            )
        return strategy

    # -- contexts -------------------------------------------------------------------------------------------------

    @property
    def _default_dtype(self) -> torch.dtype | None:
        return TRUE_DTYPES.get(self.row)

    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        if self.row in AUTOCAST_DTYPES:
            # The weight cache would keep copies of weights that have been dropped and changed since.
            device = self.strategy.root_device.type
            with torch.autocast(device, dtype=AUTOCAST_DTYPES[self.row], cache_enabled=False):
                yield
        elif self._default_dtype is not None:
            with _DtypeContextManager(self._default_dtype):
                yield
        else:
            yield

    @contextlib.contextmanager
    def tensor_init_context(self) -> Generator[None, None, None]:
        with _DtypeContextManager(self._default_dtype) if self._default_dtype else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def module_init_context(self) -> Generator[None, None, None]:
        with self.tensor_init_context():
            yield

    def convert_input(self, data: Any) -> Any:
        if self._default_dtype is None:
            return data
        return apply_to_collection(data, function=_convert_fp_tensor, dtype=Tensor, dst_type=self._default_dtype)

    def convert_module(self, module: Module) -> Module:
        return module  # the engine casts bucket by bucket

    # -- backward and clipping ------------------------------------------------------------------------------------

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

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load scaler state that DDP or FSDP has saved, under the names of their plugins."""
        for name in ("MixedPrecision", "FSDPPrecision"):
            self.load_state_dict(checkpoint.get(name) or {})

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        norms.clip_by_norm(self.strategy.engine, list(self.main_params(optimizer)), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        norms.clip_by_value(self.strategy.engine, self.main_params(optimizer), clip_val)

    def main_params(self, optimizer: Optimizer) -> Any:
        """The user's parameters of one optimizer (each once), which find their shards."""
        seen: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        return seen.values()


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
