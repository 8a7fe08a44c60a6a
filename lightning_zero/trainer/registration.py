"""Register the presets (``zero3``, ...) as names of strategies when Lightning is imported, or at once if Lightning is
imported already. At the same time extend ``load_from_checkpoint`` to load folders (``zero/checkpoint=sharded``).

Each preset has an alias (``ddp_zero3``, ...) for packages that check by name or class whether a strategy is DDP.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Container, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_zero.presets import ASKED, PRESETS

_ALIAS = "ddp_"
_TRAINER = "StrategyRegistry", "lightning_zero.trainer.strategy", "ZeroStrategy"
_FABRIC = "STRATEGY_REGISTRY", "lightning_zero.fabric.strategy", "ZeroFabricStrategy"
_REGISTRIES = {
    "lightning.pytorch.strategies": _TRAINER,
    "pytorch_lightning.strategies": _TRAINER,
    "lightning.fabric.strategies": _FABRIC,
    "lightning_fabric.strategies": _FABRIC,
}
_LOADERS = ("lightning.pytorch.core.saving", "pytorch_lightning.core.saving")  # of load_from_checkpoint


def register_presets() -> None:
    """Register every preset in Lightning's registries of strategies, now or when Lightning is imported."""
    for name in (*_REGISTRIES, *_LOADERS):
        if name in sys.modules:
            _fill(sys.modules[name])
    if not any(isinstance(finder, _Registration) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Registration())


def _fill(module: ModuleType) -> None:
    """Register missing presets in the registry of Lightning's ``module`` or, if it has none, let it load folders."""
    if module.__name__ in _LOADERS:
        module.pl_load = partial(_load, module.pl_load)  # type: ignore[attr-defined]
        return
    registry: Any = getattr(module, _REGISTRIES[module.__name__][0])
    for key, preset in PRESETS.items():
        text = f"ZeRO: stage={preset.stage}, offload={preset.offload}, start_method={preset.start_method}"
        for name in map(_Name, (key, f"{_ALIAS}{key}")):
            if name not in registry:
                name.registry = registry
                registry.register(name, partial(_make_strategy, module.__name__, name), description=text)


class _Name(str):
    """A preset's name in a registry. Before Lightning refuses an unknown strategy name, it compares the unknown name
    with all registered names. The preset that is most similar then warns that the user may have meant this preset."""

    registry: Container[str] = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not str or str.__eq__(self, other) or other in self.registry:
            return str.__eq__(self, other)
        if difflib.get_close_matches(other, PRESETS, n=1, cutoff=0.75) == [str(self)]:
            presets = ", ".join(PRESETS)
            warnings.warn(f"strategy={other!r}: did you mean {str(self)!r}? Presets are {presets}.", stacklevel=2)
        return False

    __hash__ = str.__hash__


def _make_strategy(module: str, name: str) -> Any:
    """Return a new strategy of the preset or alias ``name``, for the registry in Lightning's ``module``."""
    ASKED.append(module.removesuffix(".strategies"))
    from lightning_zero.lightning_api import check_package

    check_package(ASKED[-1])
    preset, (_, home, strategy) = PRESETS[name.removeprefix(_ALIAS)], _REGISTRIES[module]
    kind = getattr(importlib.import_module(home), ("DDP" if name.startswith(_ALIAS) else "") + strategy)
    return kind(preset.stage, offload=preset.offload, start_method=preset.start_method)


def _load(theirs: Any, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Load the checkpoint ``path`` for ``load_from_checkpoint``. Lightning's function ``theirs`` tries first; if it
    fails and ``path`` is a folder, load a checkpoint folder. (On a local disk Lightning fails with an OSError; in an
    object store a folder may read as an empty file, so all exceptions are caught.)"""
    try:
        return theirs(path, map_location=map_location, weights_only=weights_only)
    except Exception:
        from lightning_zero.tiers.remote import is_folder

        if not isinstance(path, str | os.PathLike) or not is_folder(path):
            raise
    from lightning_zero.trainer.saves.sharded_checkpoints import read_module

    return read_module(path, map_location, weights_only)


class _Registration(MetaPathFinder):
    """Import hook that acts when a module of Lightning is imported: it registers presets in the module's registry, or
    lets the module load checkpoint folders."""

    def __init__(self) -> None:
        self._finding = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._finding or fullname not in (*_REGISTRIES, *_LOADERS):
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _fill(module)

            loader.exec_module = exec_module
        return spec
