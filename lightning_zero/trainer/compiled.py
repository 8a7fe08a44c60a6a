"""Let Lightning accept a LightningModule that ``torch.compile`` made: it does so only for three strategies of its own.

The check runs before any process starts, so settings that cannot work and a missing C++ compiler are found there too.
"""

from __future__ import annotations

from typing import Any

from lightning_zero.engine.passes.compiled import find_compiler, needs_compiler
from lightning_zero.lightning_api import pl
from lightning_zero.trainer.replaced import in_place_of


@in_place_of(pl.trainer.trainer, "_verify_strategy_supports_compile")
def _verify(theirs: Any, model: pl.LightningModule, strategy: Any) -> None:
    check = getattr(strategy, "_check_before_start", None)
    if check is None:
        theirs(model, strategy)
        return
    if needs_compiler(model):
        find_compiler("torch.compile", "compile with another backend")
    check(model)
