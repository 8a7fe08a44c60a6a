"""Run Lightning's ModelPruning on shards, while parameters hold whole values.

The callback turns ``weight`` into the parameter ``weight_orig``, the buffer ``weight_mask`` and a hook. The parameter
object stays, so the engine and the optimizers keep it. Masks and the hook's products are not sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch import nn

from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.engine import engines
from lightning_zero.engine.whole.shown import show_full
from lightning_zero.lightning_api import ModelPruning, pl
from lightning_zero.trainer.replaced import in_place_of


@contextlib.contextmanager
def _with_values(engine: Engine | None) -> Generator[None, None, None]:
    """Show the whole module inside: global pruning compares the parameters of all layers. Collective."""
    if engine is None:
        yield
        return
    with show_full(engine, list(engine.module.parameters())):
        yield
    engine.sync_buffers()  # random masks differ between ranks


@in_place_of(ModelPruning, "setup")
def _setup(theirs: Any, callback: ModelPruning, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
    with _with_values(engine_of(module)):
        theirs(callback, trainer, module, stage)


@in_place_of(ModelPruning, "_run_pruning")
def _run_pruning(theirs: Any, callback: ModelPruning, current_epoch: int) -> None:
    params = {id(p) for module, _ in callback._parameters_to_prune or () for p in module.parameters(recurse=False)}
    found = (engine for engine in engines() if any(id(p) in params for p in engine.module.parameters()))
    with _with_values(next(found, None)):
        theirs(callback, current_epoch)


@in_place_of(ModelPruning, "make_pruning_permanent")
def _make_pruning_permanent(theirs: Any, callback: ModelPruning, module: nn.Module) -> None:
    with _with_values(engine_of(module)):
        theirs(callback, module)


@in_place_of(ModelPruning, "on_save_checkpoint")
def _on_save_checkpoint(
    theirs: Any, callback: ModelPruning, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
) -> None:
    """Apply masks to the state dict being saved. The callback would ask the module for a new one."""
    if engine_of(module) is None:
        theirs(callback, trainer, module, checkpoint)
        return
    state = checkpoint["state_dict"]
    module.__dict__["state_dict"] = lambda *_, **__: type(state)(state)
    try:
        theirs(callback, trainer, module, checkpoint)
    finally:
        module.__dict__.pop("state_dict", None)
