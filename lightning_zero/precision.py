"""Lightning's side of precision: contexts, inputs and clipping. The dtypes of parameters are the engine's business."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor, _DtypeContextManager
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.config import ConfigError, Precision
from lightning_zero.engine import norms

if TYPE_CHECKING:
    from lightning_zero.strategy import ZeroStrategy

# Trainer(precision=...) -> row of zero/precision
ROWS = {"32-true": Precision.fp32, "bf16-mixed": Precision.bf16, "bf16-true": Precision.bf16_true}
FLAGS = {row: flag for flag, row in ROWS.items()}


class ZeroPrecision(LightningPrecision):
    """Precision of :class:`~lightning_zero.ZeroStrategy`. The strategy makes it from ``Trainer(precision=)``.

    Args:
        precision: ``32-true``, ``bf16-mixed`` or ``bf16-true``.

    Raises:
        ConfigError: another precision.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in ROWS:
            raise ConfigError(
                f"trainer.precision: expected one of {', '.join(ROWS)} with a ZeRO strategy, got {precision!r}. "
                f"Change Trainer(precision=) or zero/precision ({', '.join(r.name for r in ROWS.values())})."
            )
        self.precision = precision  # type: ignore[assignment]
        self._strategy: ReferenceType[ZeroStrategy] | None = None

    @property
    def row(self) -> Precision:
        return ROWS[str(self.precision)]

    @classmethod
    def from_plugin(cls, plugin: LightningPrecision) -> ZeroPrecision:
        """Ours in place of the plugin that Lightning chose or a user gave."""
        if isinstance(plugin, cls):
            return plugin
        known = {"Precision", "MixedPrecision", "HalfPrecision", "FSDPPrecision"}
        if type(plugin).__name__ not in known:
            raise ConfigError(
                f"the precision plugin {type(plugin).__name__} cannot be used with a ZeRO strategy. Drop it and set "
                f"Trainer(precision=) to one of {', '.join(ROWS)}."
            )
        return cls(str(plugin.precision))

    def attach(self, strategy: ZeroStrategy) -> None:
        self._strategy = ref(strategy)

    @property
    def strategy(self) -> ZeroStrategy:
        strategy = self._strategy() if self._strategy is not None else None
        if strategy is None:
            raise ConfigError(
                "ZeroPrecision works with ZeroStrategy only. Use Trainer(strategy='zero3', precision=...)."
            )
        return strategy

    # -- contexts -------------------------------------------------------------------------------------------------

    @property
    def _default_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.row is Precision.bf16_true else None

    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        if self.row is Precision.bf16:
            # The weight cache would keep copies of weights that have been dropped and changed since.
            device = self.strategy.root_device.type
            with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
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

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Reduction ends inside, so that ``on_after_backward`` finds finished gradients."""
        with self.strategy.engine.backward_scope():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        norms.clip_by_norm(self.strategy.engine, list(self.main_params(optimizer)), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        norms.clip_by_value(self.strategy.engine, self.main_params(optimizer), clip_val)

    def main_params(self, optimizer: Optimizer) -> Any:
        """The user's parameters of one optimizer (each once), which find their shards."""
        seen: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        return seen.values()
