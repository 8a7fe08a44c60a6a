"""Lightning's ModelPruning on shards.

The callback computes masks from the values of parameters, and replaces these: ``weight`` becomes the parameter
``weight_orig``, the buffer ``weight_mask``, and a hook that multiplies them before each forward. Here all of that runs
where parameters hold their whole values. They stay the same objects under another name, so that the engine and the
optimizers keep them. Masks, and the products that the hooks leave on modules, are not sharded.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from torch import nn

from lightning_zero.engine import engine_of
from lightning_zero.engine.whole.shown import show_full
from lightning_zero.lightning_api import ModelPruning, pl

_WITH_VALUES = ("setup", "_run_pruning", "make_pruning_permanent")
_SAVING = "on_save_checkpoint"


def attach(trainer: pl.Trainer) -> None:
    for callback in _pruning(trainer):
        for name in _WITH_VALUES:
            callback.__dict__[name] = partial(_with_values, callback, trainer.lightning_module, name)
        callback.__dict__[_SAVING] = partial(_on_save_checkpoint, callback)


def let_go(trainer: pl.Trainer) -> None:
    """Give the callbacks their own methods back after the run, except for the one that saves, which is still needed."""
    for callback in _pruning(trainer):
        for name in _WITH_VALUES:
            callback.__dict__.pop(name, None)


def _pruning(trainer: pl.Trainer) -> list[ModelPruning]:
    return [c for c in trainer.callbacks if isinstance(c, ModelPruning)]  # type: ignore[attr-defined]


def _with_values(callback: ModelPruning, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
    """Global pruning compares the parameters of all layers: the whole module is shown, on all ranks."""
    engine = engine_of(module)
    shown = contextlib.nullcontext() if engine is None else show_full(engine, list(module.parameters()))
    with shown:
        getattr(type(callback), name)(callback, *args, **kwargs)
    if engine is not None:
        engine.sync_buffers()  # masks that were drawn at random: rank 0's


def _on_save_checkpoint(
    callback: ModelPruning, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
) -> None:
    """Masks are applied to the state dict that is saved. The callback would ask the module for another one."""
    state = checkpoint["state_dict"]
    pl_module.__dict__["state_dict"] = lambda *_, **__: type(state)(state)
    try:
        type(callback).on_save_checkpoint(callback, trainer, pl_module, checkpoint)
    finally:
        pl_module.__dict__.pop("state_dict", None)
