"""Makes the presets known to Lightning as strategy names, without importing Lightning.

Where ``lightning.pytorch.strategies`` has been imported, its registry is filled at once. Otherwise a finder waits on
``sys.meta_path`` until it is, fills the registry and takes itself away.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_zero.presets import PRESETS

if TYPE_CHECKING:
    from lightning_zero.trainer.strategy import ZeroStrategy

_REGISTRY_HOME = "lightning.pytorch.strategies"


def register_presets() -> None:
    """Register every preset now, or as soon as Lightning's registry is there."""
    # Lightning's own code, by torch 2.13: nobody who sees this can change it, and every rank says it.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    if not _register_now() and not any(isinstance(f, _RegistrationFinder) for f in sys.meta_path):
        sys.meta_path.insert(0, _RegistrationFinder())


def _register_now() -> bool:
    home = sys.modules.get(_REGISTRY_HOME)
    registry: Any = getattr(home, "StrategyRegistry", None)
    if registry is None:  # not imported, or still executing. (An empty registry is falsy.)
        return False
    for name, row in PRESETS.items():
        if name not in registry:
            registry.register(name, _factory(name), description=f"ZeRO: stage={row.stage}, offload={row.offload}")
    return True


def _factory(name: str) -> Callable[[], ZeroStrategy]:
    """A function that the registry calls for ``Trainer(strategy=name)``; the strategy is imported only then."""

    def make_strategy() -> ZeroStrategy:
        from lightning_zero.trainer.strategy import ZeroStrategy

        row = PRESETS[name]
        return ZeroStrategy(row.stage, offload=row.offload)

    return make_strategy


class _RegistrationFinder(MetaPathFinder):
    """Finds nothing itself: has the registry's module found by the others, and registers once it has executed.

    Where we are imported while that module is executing, the next import of anything is the occasion.
    """

    def __init__(self) -> None:
        self._idle = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._idle:
            return None
        if fullname != _REGISTRY_HOME:
            # Stays in the list, which is being iterated over: to take a finder out would skip the next one.
            self._idle = _register_now()
            return None
        self._idle = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._idle = False
        if spec is not None and spec.loader is not None:
            self._register_after(spec.loader)
        return spec

    def _register_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as it was, also for a reload
            execute(module)
            if _register_now() and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module
