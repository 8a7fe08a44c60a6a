"""The strategies, for those who import ``pytorch_lightning`` or ``lightning_fabric`` in the place of ``lightning``.

``Trainer(strategy="zero3")`` of ``pytorch_lightning`` and ``Fabric(strategy="zero3")`` of ``lightning_fabric`` need
nothing from here. With settings::

    from lightning_zero.pytorch_lightning import ZeroStrategy

Lightning is published under both names, as the same sources twice, and no class of one is a class of the other. So
ours are there twice too: ``mirror`` loads the modules that name Lightning a second time, with the other names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_zero.pytorch_lightning.mirror import install

if TYPE_CHECKING:
    from lightning_zero.fabric.strategy import ZeroFabricStrategy as ZeroFabricStrategy
    from lightning_zero.trainer.callbacks.monitor import ZeroMonitor as ZeroMonitor
    from lightning_zero.trainer.precision import ZeroPrecision as ZeroPrecision
    from lightning_zero.trainer.strategy import ZeroStrategy as ZeroStrategy

_HOMES = {
    "ZeroStrategy": "trainer.strategy",
    "ZeroPrecision": "trainer.precision",
    "ZeroMonitor": "trainer.callbacks.monitor",
    "ZeroFabricStrategy": "fabric.strategy",
}

__all__ = ["ZeroFabricStrategy", "ZeroMonitor", "ZeroPrecision", "ZeroStrategy"]

install(__name__)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
