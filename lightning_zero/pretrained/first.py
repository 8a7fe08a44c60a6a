"""First values of modules that have another way to make them than ``reset_parameters``.

Models of transformers have one for all their modules (``_init_weights``), which also makes buffers that are in no file,
such as the frequencies of rotary embeddings. Layers that PEFT has put around others make their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_zero.config import ConfigError

ADAPTER = "reset_lora_parameters"  # what PEFT's layers have


def resetter(root: nn.Module, name: str, module: nn.Module) -> Callable[[], Any] | None:
    """What gives tensors of ``module``, which is ``name`` in ``root``, their first values; None if nothing does.

    What it does to tensors on meta has no effect.
    """
    if _in_adapter(root, name):
        return lambda: None  # all of an adapter at once: :func:`reset_adapter`
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        for outer in _outers(root, name):
            if isinstance(outer, transformers.PreTrainedModel):
                return lambda outer=outer: outer._init_weights(module)  # type: ignore[misc]
    found = getattr(module, "reset_parameters", None)
    return found if callable(found) else None


def _outers(root: nn.Module, name: str) -> Iterator[Any]:
    """The modules that hold ``name``, itself first."""
    parts = name.split(".") if name else []
    for n in range(len(parts), -1, -1):
        yield root.get_submodule(".".join(parts[:n]))


def _in_adapter(root: nn.Module, name: str) -> bool:
    """Whether a module belongs to an adapter: ``...q_proj.lora_A.default``."""
    parts = name.split(".")
    first = next((n for n, part in enumerate(parts) if part.startswith("lora_")), None)
    return first is not None and hasattr(root.get_submodule(".".join(parts[:first])), ADAPTER)


def reset_adapter(root: nn.Module, name: str, layer: Any) -> None:
    """Make the first values of the adapters of ``layer``, which is ``name`` in ``root``, as PEFT makes them.

    Raises:
        ConfigError: they follow from the values of the layer, which are not here.
    """
    configs: Any = next((c for o in _outers(root, name) if isinstance(c := getattr(o, "peft_config", None), dict)), {})
    for adapter in {*layer.lora_A, *layer.lora_embedding_A}:
        way = getattr(configs.get(adapter), "init_lora_weights", True)
        if way is not True and way != "gaussian":
            raise ConfigError(
                f"adapter {adapter} of {name} is on the meta device, where init_lora_weights={way!r} cannot be done. "
                "Take True or 'gaussian', or build the model off meta."
            )
        getattr(layer, ADAPTER)(adapter, way)
