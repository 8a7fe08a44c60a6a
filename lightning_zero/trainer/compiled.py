"""Lightning's check of strategies for models that ``torch.compile`` has made: ours compile too.

Lightning takes a compiled LightningModule only where the strategy is of one of three classes that it names, and asks
nobody else. So the function that compares them is another one for our strategies, and the same for all others. It is
called before any process starts, which makes it the place to miss a C++ compiler too, and to look at layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.trainer.trainer as lightning_trainer
from lightning.pytorch.strategies import Strategy

from lightning_zero.config import ZeroConfig
from lightning_zero.engine.passes.compiled import find_compiler, needs_compiler
from lightning_zero.sequence.model import check_model

_CHECK = "_verify_strategy_supports_compile"


def accept(kind: type[Strategy]) -> None:
    """Have Lightning take compiled models under strategies of ``kind``."""
    check: Callable[[Any, Any], None] | None = getattr(lightning_trainer, _CHECK, None)
    if check is None:  # a Lightning without the check
        return

    def verify(model: pl.LightningModule, strategy: Strategy) -> None:
        if not isinstance(strategy, kind):
            check(model, strategy)
            return
        if needs_compiler(model):
            find_compiler("torch.compile", "compile with another backend")
        config: ZeroConfig = strategy.config  # type: ignore[attr-defined]
        check_model(model, config.sequence_parallel, syncs_norms=bool(getattr(strategy, "_layer_sync", None)))

    setattr(lightning_trainer, _CHECK, verify)
