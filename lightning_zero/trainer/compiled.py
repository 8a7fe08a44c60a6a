"""Lightning's check of strategies for models that ``torch.compile`` has made: ours compile too.

Lightning takes a compiled LightningModule only where the strategy is of one of three classes that it names, and asks
nobody else. So the function that compares them is another one for our strategies, and the same for all others. It is
called before any process starts, which makes it the place to miss a C++ compiler too, and what else a strategy misses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning_zero.engine.passes.compiled import find_compiler, needs_compiler
from lightning_zero.lightning_api import pl

_CHECK = "_verify_strategy_supports_compile"


class _Checks(Protocol):
    """A strategy that says what it misses."""

    def check_before_start(self, model: pl.LightningModule) -> None: ...


def accept(kind: type[_Checks]) -> None:
    """Have Lightning take compiled models under strategies of ``kind``, and ask these what a run lacks."""
    check: Callable[[Any, Any], None] | None = getattr(pl.trainer.trainer, _CHECK, None)
    if check is None:  # a Lightning without the check
        return

    def verify(model: pl.LightningModule, strategy: Any) -> None:
        if not isinstance(strategy, kind):
            check(model, strategy)
            return
        if needs_compiler(model):
            find_compiler("torch.compile", "compile with another backend")
        strategy.check_before_start(model)

    setattr(pl.trainer.trainer, _CHECK, verify)
