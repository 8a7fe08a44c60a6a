"""Make Lightning's fine-tuning callbacks compare sharded parameters, which have no values to compare, by identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_zero.engine.engine import engines
from lightning_zero.lightning_api import BaseFinetuning


class _EqualIfSame(TorchFunctionMode):
    """Lets ``torch.equal`` compare a sharded parameter by identity."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.equal and any(engine.units.owns(args[0]) for engine in engines()):
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))


class FinetunesShards(BaseFinetuning):
    @staticmethod
    def filter_on_optimizer(*args: Any, **kwargs: Any) -> list[Any]:
        with _EqualIfSame():
            return BaseFinetuning.filter_on_optimizer(*args, **kwargs)

    @staticmethod
    def unfreeze_and_add_param_group(*args: Any, **kwargs: Any) -> None:
        with _EqualIfSame():
            BaseFinetuning.unfreeze_and_add_param_group(*args, **kwargs)
