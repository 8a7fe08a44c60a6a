"""ZeRO stages 0-3 as a strategy of PyTorch Lightning, and of Fabric.

``import lightning_zero`` makes ``Trainer(strategy="zero3")`` and ``Fabric(strategy="zero3")`` work. It imports neither
torch nor Lightning: the public names below are imported when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from lightning_zero.trainer.registration import register_presets

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        "lightning_zero needs torch, which this Python does not find. Activate the environment in which lightning_zero "
        "is installed (after make: source .venv/bin/activate), or run pip install . in its repository."
    )

if TYPE_CHECKING:
    from lightning_zero.app.memory_plan import plan_memory as plan_memory
    from lightning_zero.checkpoint.hugging_face.export import stream as stream
    from lightning_zero.engine import clip_grad_norm_ as clip_grad_norm_
    from lightning_zero.engine import gather as gather
    from lightning_zero.engine import grad_norm as grad_norm
    from lightning_zero.fabric.strategy import ZeroFabricStrategy as ZeroFabricStrategy
    from lightning_zero.layerwise.loss import chunked_loss as chunked_loss
    from lightning_zero.sequence.attention import attention as attention
    from lightning_zero.sequence.part import SequencePart as SequencePart
    from lightning_zero.sequence.part import mean_over_tokens as mean_over_tokens
    from lightning_zero.sequence.part import sequence_positions as sequence_positions
    from lightning_zero.settings import ZeroConfig as ZeroConfig
    from lightning_zero.sharding import shard as shard
    from lightning_zero.trainer.callbacks.monitor import ZeroMonitor as ZeroMonitor
    from lightning_zero.trainer.precision import ZeroPrecision as ZeroPrecision
    from lightning_zero.trainer.step_tokens import divide_by_tokens as divide_by_tokens
    from lightning_zero.trainer.strategy import ZeroStrategy as ZeroStrategy

__version__ = "0.1.0"

_HOMES = {
    "ZeroStrategy": "lightning_zero.trainer.strategy",
    "ZeroFabricStrategy": "lightning_zero.fabric.strategy",
    "ZeroConfig": "lightning_zero.settings",
    "ZeroPrecision": "lightning_zero.trainer.precision",
    "ZeroMonitor": "lightning_zero.trainer.callbacks.monitor",
    "chunked_loss": "lightning_zero.layerwise.loss",
    "gather": "lightning_zero.engine",
    "grad_norm": "lightning_zero.engine",
    "clip_grad_norm_": "lightning_zero.engine",
    "shard": "lightning_zero.sharding",
    "stream": "lightning_zero.checkpoint.hugging_face.export",
    "attention": "lightning_zero.sequence.attention",
    "SequencePart": "lightning_zero.sequence.part",
    "mean_over_tokens": "lightning_zero.sequence.part",
    "sequence_positions": "lightning_zero.sequence.part",
    "divide_by_tokens": "lightning_zero.trainer.step_tokens",
    "plan_memory": "lightning_zero.app.memory_plan",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # found once: the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


register_presets()
