"""Lightning's fine-tuning callbacks on sharded parameters.

They leave out parameters that the optimizer has already, and find these by comparing *values*, which sharded parameters
do not show. While such a callback works, parameters are compared by identity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.lightning_api import BaseFinetuning, pl

_PATCHED = "finetune_function"


def attach(trainer: pl.Trainer) -> None:
    for callback in _finetuning(trainer):
        callback.__dict__[_PATCHED] = partial(_finetune, callback)


def let_go(trainer: pl.Trainer) -> None:
    """Give the callbacks their own methods back, after the run."""
    for callback in _finetuning(trainer):
        callback.__dict__.pop(_PATCHED, None)


def _finetuning(trainer: pl.Trainer) -> list[BaseFinetuning]:
    return [c for c in trainer.callbacks if isinstance(c, BaseFinetuning)]  # type: ignore[attr-defined]


def _finetune(callback: BaseFinetuning, *args: Any, **kwargs: Any) -> None:
    with _compared_by_identity():
        type(callback).finetune_function(callback, *args, **kwargs)


@contextlib.contextmanager
def _compared_by_identity() -> Iterator[None]:
    kept = BaseFinetuning.__dict__["filter_on_optimizer"]
    BaseFinetuning.filter_on_optimizer = staticmethod(_not_in_optimizer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseFinetuning.filter_on_optimizer = kept  # type: ignore[method-assign]


def _not_in_optimizer(optimizer: Optimizer, params: Iterable[Parameter]) -> list[Parameter]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in params if id(p) not in known]
