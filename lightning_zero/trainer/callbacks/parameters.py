"""Run Lightning's ModelPruning and BaseFinetuning callbacks on a sharded module.

ModelPruning runs while all parameters are gathered. It turns ``weight`` into the parameter ``weight_orig``, the buffer
``weight_mask`` and a hook. The parameter object stays the same, so the engine and the optimizers keep it. Masks, and
the weights that the hook computes, are not sharded. BaseFinetuning compares values of parameters, but sharded
parameters have none, so they are compared by identity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.engine import engines
from lightning_zero.engine.whole.whole_params import show_gathered
from lightning_zero.lightning_api import BaseFinetuning, ModelPruning, pl
from lightning_zero.settings import ConfigError


@contextlib.contextmanager
def _with_values(engine: Engine | None) -> Generator[None, None, None]:
    """Gather all parameters of the engine's module during the body (global pruning compares all layers), then broadcast
    rank 0's buffers. Do nothing if ``engine`` is None. Collective."""
    if engine is None:
        yield
        return
    with show_gathered(engine, list(engine.module.parameters())):
        yield
    engine.passes.buffers.sync()  # random masks differ between ranks


class PrunesShards(ModelPruning):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        if splits := strategy.config.splits:
            raise ConfigError(
                f"ModelPruning: expected parameters that each rank holds whole, got {splits}. Drop the callback, or "
                "this setting."
            )
        with _with_values(engine_of(pl_module)):
            super().setup(trainer, pl_module, stage)

    def _run_pruning(self, current_epoch: int) -> None:
        params = {id(p) for module, _ in self._parameters_to_prune or () for p in module.parameters(recurse=False)}
        found = (engine for engine in engines() if any(id(p) in params for p in engine.module.parameters()))
        with _with_values(next(found, None)):
            super()._run_pruning(current_epoch)

    def make_pruning_permanent(self, module: nn.Module) -> None:
        with _with_values(engine_of(module)):
            super().make_pruning_permanent(module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Apply masks to the state dict in ``checkpoint``. Lightning's method alone would build a new state dict."""
        if engine_of(pl_module) is None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            return
        state = checkpoint["state_dict"]
        pl_module.__dict__["state_dict"] = lambda *_, **__: type(state)(state)
        try:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
        finally:
            pl_module.__dict__.pop("state_dict", None)


class _EqualIfSame(TorchFunctionMode):
    """Lets ``torch.equal`` compare a sharded parameter by identity."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.equal and any(engine.units.owns(args[0]) for engine in engines()):
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))


class FinetunesShards(BaseFinetuning):
    @staticmethod
    def filter_on_optimizer(*args: Any, **kwargs: Any) -> list[Any]:
        with _EqualIfSame():
            return BaseFinetuning.filter_on_optimizer(*args, **kwargs)

    @staticmethod
    def unfreeze_and_add_param_group(*args: Any, **kwargs: Any) -> None:
        with _EqualIfSame():
            BaseFinetuning.unfreeze_and_add_param_group(*args, **kwargs)
