"""Makes the presets known to Lightning as strategy names, without importing Lightning.

There are four registries: of the Trainer and of Fabric, in ``lightning`` and in the packages that have each of them
alone. Those that are there are filled at once. For the others a finder waits on ``sys.meta_path``; it fills one when
its module has been imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from lightning_zero.presets import PRESETS


class _Registry(NamedTuple):
    name: str  # in its module
    home: str  # of the strategy
    strategy: str


def _registries(of_trainer: str, of_fabric: str, package: str) -> dict[str, _Registry]:
    return {
        f"{of_trainer}.strategies": _Registry("StrategyRegistry", f"{package}.trainer.strategy", "ZeroStrategy"),
        f"{of_fabric}.strategies": _Registry("STRATEGY_REGISTRY", f"{package}.fabric.strategy", "ZeroFabricStrategy"),
    }


_REGISTRIES = _registries("lightning.pytorch", "lightning.fabric", "lightning_zero") | _registries(
    "pytorch_lightning", "lightning_fabric", "lightning_zero.pytorch_lightning"
)


def register_presets() -> None:
    """Register every preset now, or as soon as a registry of Lightning's is there."""
    _fill_those_there()
    if _waiting() and not any(isinstance(f, _RegistrationFinder) for f in sys.meta_path):
        sys.meta_path.insert(0, _RegistrationFinder())


_filled: set[str] = set()  # modules


def _waiting() -> list[str]:
    return [module for module in _REGISTRIES if module not in _filled]


def _fill_those_there() -> None:
    for module in _waiting():
        where = _REGISTRIES[module]
        registry: Any = getattr(sys.modules.get(module), where.name, None)
        if registry is None:  # not imported, or still executing. (An empty registry is falsy.)
            continue
        for name, row in PRESETS.items():
            if name not in registry:
                text = f"ZeRO: stage={row.stage}, offload={row.offload}, start_method={row.start_method}"
                registry.register(name, _factory(where, name), description=text)
        _filled.add(module)


def _factory(where: _Registry, name: str) -> Callable[[], Any]:
    """A function that the registry calls for ``strategy=name``; the strategy is imported only then."""

    def make_strategy() -> Any:
        row = PRESETS[name]
        strategy = getattr(importlib.import_module(where.home), where.strategy)
        return strategy(row.stage, offload=row.offload, start_method=row.start_method)

    return make_strategy


class _RegistrationFinder(MetaPathFinder):
    """Finds nothing itself: has a registry's module found by the others, and fills it once it has executed.

    Where we are imported while such a module is executing, the next import of anything is the occasion.
    """

    def __init__(self) -> None:
        self._idle = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._idle:
            return None
        if fullname not in _waiting():
            # Stays in the list, which is being iterated over: to take a finder out would skip the next one.
            _fill_those_there()
            self._idle = not _waiting()
            return None
        self._idle = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._idle = False
        if spec is not None and spec.loader is not None:
            self._fill_after(spec.loader)
        return spec

    def _fill_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as it was, also for a reload
            execute(module)
            _fill_those_there()
            if not _waiting() and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module
