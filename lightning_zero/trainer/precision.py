"""Precision plugins: the base class for the Trainer and Fabric (autocast, default dtype, input dtype), and the plugin
of the Trainer (backward, loss scaling, clipping). The engine casts parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, ClassVar, Self
from weakref import ReferenceType, ref

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.engine.torch_modes import default_dtype, outside_graphs
from lightning_zero.engine.units.bucket import Place
from lightning_zero.engine.units.describe import AUTOCAST_DTYPES, TRUE_DTYPES
from lightning_zero.lightning_api import pl
from lightning_zero.optimizers.loss_scale import LossScaler
from lightning_zero.settings import ConfigError, Precision

FLAGS = [row.value for row in Precision]


def to_dtype(data: Any, dtype: torch.dtype) -> Any:
    return apply_to_collection(data, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class PrecisionRow:
    """Base class of the precision plugins. Raises ConfigError if ``precision`` is none of the values below.

    Args:
        precision: ``32-true``, ``bf16-mixed``, ``16-mixed``, ``bf16-true``, ``16-true`` or ``64-true``.
        scaler: scales losses under ``16-mixed``. Default: a scaler with the settings of ``torch.amp.GradScaler``.
    """

    front: ClassVar[str] = "Trainer"  # or "Fabric", for messages
    precision: Any

    def __init__(self, precision: str = "32-true", scaler: LossScaler | None = None) -> None:
        if precision not in FLAGS:
            raise ConfigError(
                f"{self.front.lower()}.precision: expected one of {', '.join(FLAGS)} with a ZeRO strategy, got "
                f"{precision!r}. Change {self.front}(precision=) or zero/precision "
                f"({', '.join(Precision.__members__)})."
            )
        self.precision = precision
        if scaler is not None and self.row is not Precision.fp16:
            raise ConfigError(
                f"scaler: expected None with precision {precision!r}, which scales no losses, got a LossScaler. Drop "
                "the scaler, or set precision to 16-mixed."
            )
        self.scaler = scaler or (LossScaler() if self.row is Precision.fp16 else None)
        self._strategy: ReferenceType[Any] | None = None

    @property
    def row(self) -> Precision:
        return Precision(self.precision)

    @classmethod
    def from_plugin(cls, plugin: Any, asked: Precision | None = None) -> Self:
        """Return a plugin of this class with the settings of Lightning's ``plugin``. Raise ConfigError if its precision
        is not supported, or differs from ``asked``, the precision set on the strategy (None: not set). ``asked`` may
        replace ``32-true``, because Lightning does not tell whether the user gave this value or it is the default."""
        if asked is not None and type(plugin).__name__ == "Precision":
            return cls(asked.value)
        ours = plugin
        if not isinstance(plugin, cls):
            known = {"Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision", "FSDPPrecision"}
            if type(plugin).__name__ not in known:
                raise ConfigError(
                    f"the precision plugin {type(plugin).__name__} cannot be used with a ZeRO strategy. Drop the "
                    f"plugin, and set {cls.front}(precision=) to one of {', '.join(FLAGS)}."
                )
            given = getattr(plugin, "scaler", None)
            ours = cls(str(plugin.precision), None if given is None else LossScaler.like(given))
        if asked is not None and ours.row is not asked:
            raise ConfigError(
                f"{cls.front.lower()}.precision: expected {asked.value!r}, because the strategy has precision "
                f"{asked.name!r}, got {ours.precision!r}. Drop one of the two."
            )
        return ours

    def attach(self, strategy: Any) -> Self:
        self._strategy = ref(strategy)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_strategy": None}  # a copied strategy attaches itself to its copy of this plugin

    @property
    def strategy(self) -> Any:
        strategy = self._strategy() if self._strategy is not None else None
        if strategy is None:
            raise ConfigError(
                f"{type(self).__name__} works with a ZeRO strategy only. Call {self.front}(strategy='zero3', "
                "precision=...)."
            )
        return strategy

    # -- contexts -------------------------------------------------------------------------------------------------

    @property
    def _default_dtype(self) -> torch.dtype | None:
        return TRUE_DTYPES.get(self.row)

    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        if self.row in AUTOCAST_DTYPES:
            # Without autocast's weight cache, which would keep stale copies of released weights.
            device = self.strategy.root_device.type
            with torch.autocast(device, dtype=AUTOCAST_DTYPES[self.row], cache_enabled=False):
                yield
        elif self._default_dtype is not None:
            with default_dtype(self._default_dtype):
                yield
        else:
            yield

    @contextlib.contextmanager
    def tensor_init_context(self) -> Generator[None, None, None]:
        with default_dtype(self._default_dtype or torch.get_default_dtype()):
            yield

    module_init_context = tensor_init_context

    def convert_input(self, data: Any) -> Any:
        return data if self._default_dtype is None else to_dtype(data, self._default_dtype)

    def convert_module(self, module: Module) -> Module:
        return module  # the engine casts bucket by bucket

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    def main_params(self, optimizer: Optimizer) -> Any:
        seen: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        return seen.values()


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
        """Run the loss's backward, and reduce all gradients before ``on_after_backward``. Collective."""
        engine = self.strategy.engine
        if self.scaler is not None:
            engine.passes.reducer.set_loss_scale(self.scaler.scale)
        with engine.passes.backward_scope():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @outside_graphs
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run ``closure``, step the optimizer, and return the closure's result. With loss scaling, all ranks skip the
        step if a gradient overflowed on any rank. Collective."""
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
        """Load the loss scaler's state also from a checkpoint that DDP's or FSDP's precision plugin has saved."""
        for name in ("MixedPrecision", "FSDPPrecision"):
            self.load_state_dict(checkpoint.get(name) or {})

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        norm = self.strategy.engine.passes.sharded_grads.clip_by_norm(self._places(optimizer), clip_val)
        self.strategy._interruptions.not_finite.note(norm, is_norm=True)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self.strategy.engine.passes.sharded_grads.clip_by_value(self._places(optimizer), clip_val)

    def _places(self, optimizer: Optimizer) -> list[Place]:
        return [self.strategy.engine.units.place_of(param) for param in self.main_params(optimizer)]
