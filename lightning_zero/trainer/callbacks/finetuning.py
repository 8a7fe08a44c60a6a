"""Make Lightning's fine-tuning callbacks compare sharded parameters by identity, since they show no values to
compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.engine.engine import engines
from lightning_zero.lightning_api import BaseFinetuning
from lightning_zero.trainer.replaced import in_place_of


@in_place_of(BaseFinetuning, "filter_on_optimizer")
def _not_in_optimizer(theirs: Any, optimizer: Optimizer, params: Iterable[Parameter]) -> list[Parameter]:
    params = list(params)
    if not any(engine.owns(param) for engine in engines() for param in params):
        return list(theirs(optimizer, params))
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in params if id(p) not in known]
