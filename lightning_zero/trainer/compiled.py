"""Lightning's check of strategies for models that ``torch.compile`` has made: ours compile too.

Lightning takes a compiled LightningModule only where the strategy is of one of three classes that it names, and asks
nobody else. So the function that compares them is another one for our strategies, and the same for all others. It is
called before any process starts, which makes it the place to miss a C++ compiler too, and what else a strategy misses.
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
