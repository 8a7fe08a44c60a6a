"""Find how a module initializes its values: by ``reset_parameters``, transformers' ``_init_weights``, or PEFT's layers.

``_init_weights`` also initializes buffers that no file holds (rotary frequencies)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_zero.settings import ConfigError

ADAPTER = "reset_lora_parameters"


def resetter(root: nn.Module, name: str, module: nn.Module) -> Callable[[], Any] | None:
    """Return a function that initializes ``module``, named ``name`` in ``root``; None if no way to do so is known."""
    parts = name.split(".")
    first = next((n for n, part in enumerate(parts) if part.startswith("lora_")), None)
    # A module of an adapter: ``...q_proj.lora_A.default``.
    if first is not None and hasattr(root.get_submodule(".".join(parts[:first])), ADAPTER):
        return lambda: None  # :func:`reset_adapter` initializes a whole adapter
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is not None:
        for outer in _outers(root, name):
            if isinstance(outer, transformers.PreTrainedModel):
                return lambda outer=outer: outer._init_weights(module)  # type: ignore[misc]
    found = getattr(module, "reset_parameters", None)
    return found if callable(found) else None


def _outers(root: nn.Module, name: str) -> Iterator[Any]:
    """Yield the module called ``name`` in ``root``, then the modules that contain it, innermost first."""
    parts = name.split(".") if name else []
    for n in range(len(parts), -1, -1):
        yield root.get_submodule(".".join(parts[:n]))


def reset_adapter(root: nn.Module, name: str, layer: Any) -> None:
    """Initialize the adapters of ``layer``, named ``name`` in ``root``, as PEFT does. Raise ConfigError if PEFT's
    method needs the values of ``layer``."""
    configs: Any = next((c for o in _outers(root, name) if isinstance(c := getattr(o, "peft_config", None), dict)), {})
    for adapter in {*layer.lora_A, *layer.lora_embedding_A}:
        way = getattr(configs.get(adapter), "init_lora_weights", True)
        if way is not True and way != "gaussian":
            raise ConfigError(
                f"init_lora_weights: expected True or 'gaussian' for adapter {adapter} of {name}, which is on the meta "
                f"device, got {way!r}, which needs values. Change init_lora_weights, or build the model on a device."
            )
        getattr(layer, ADAPTER)(adapter, way)
