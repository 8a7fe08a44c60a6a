"""Lightning's WeightAveraging (and EMA) callbacks on shards.

The callback copies the whole module before it is sharded, and updates and swaps parameters one by one. Here its copy is
a copy of this rank's master shards, and updates and swaps run on these; checkpoints hold full tensors as they do
without sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import get_swa_multi_avg_fn

from lightning_zero.engine import Engine, engine_of, values
from lightning_zero.engine.engine import outside_autograd

_WAITING = "_lightning_zero_checkpoint"  # a checkpoint that was loaded before there were shards
_PATCHED = ("setup", "_swap_models", "_copy_average_to_current", "on_load_checkpoint", _WAITING)


class ShardedAverage:
    """Stands for the callback's ``AveragedModel``: same methods, on shards."""

    @outside_autograd
    def __init__(self, engine: Engine, *, use_buffers: bool, device: Any = None, **kwargs: Any) -> None:
        self.engine = engine
        self._device = device
        self._avg_fn: Callable[..., Any] | None = kwargs.get("avg_fn")
        self._multi_avg_fn: Callable[..., Any] | None = kwargs.get("multi_avg_fn")
        if self._avg_fn is None and self._multi_avg_fn is None:
            self._multi_avg_fn = get_swa_multi_avg_fn()
        self._use_buffers = use_buffers
        self.n_averaged = torch.tensor(0, dtype=torch.long)
        engine.settle()
        self._shards = [self._place(b.master) for b in engine.buckets]
        self._buffers = [self._place(b) for b in engine.module.buffers()]
        self.module = _AveragedModule(self)

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device if self._device is not None else tensor.device, copy=True)

    @outside_autograd
    def update_parameters(self, module: Any) -> None:
        engine = self.engine
        engine.settle()
        current = [b.master for b in engine.buckets]
        # A bucket that was frozen and is trainable now has a master of another dtype.
        self._shards = [a.to(c.dtype) for a, c in zip(self._shards, current, strict=True)]
        own = list(self._shards)
        if self._use_buffers:
            own, current = own + self._buffers, current + list(engine.module.buffers())
        self._average(own, current)
        if not self._use_buffers:
            for average, buffer in zip(self._buffers, engine.module.buffers(), strict=True):
                average.copy_(buffer)
        self.n_averaged += 1

    def _average(self, own: list[Tensor], current: list[Tensor]) -> None:
        floats = [(a, c.to(a.device)) for a, c in zip(own, current, strict=True) if a.is_floating_point()]
        for a, c in zip(own, current, strict=True):
            if self.n_averaged == 0 or not a.is_floating_point():
                a.copy_(c)
        if self.n_averaged == 0:
            return
        if self._multi_avg_fn is not None:
            self._multi_avg_fn([a for a, _ in floats], [c for _, c in floats], self.n_averaged)
        else:
            assert self._avg_fn is not None
            for a, c in floats:
                a.copy_(self._avg_fn(a, c, self.n_averaged.to(a.device)))

    @outside_autograd
    def exchange(self, *, swap: bool) -> None:
        """Put the averages into the model; with ``swap`` also the model's values into the averages."""
        engine = self.engine
        engine.settle()
        pairs = [(a, b.master) for a, b in zip(self._shards, engine.buckets, strict=True)]
        pairs += list(zip(self._buffers, engine.module.buffers(), strict=True))
        for average, current in pairs:
            previous = current.clone() if swap else None
            current.copy_(average)
            if previous is not None:
                average.copy_(previous)
        engine.masters_changed()

    def state_dict(self) -> dict[str, Any]:
        """On all ranks: the ``AveragedModel``'s state dict with full tensors; empty on other ranks than 0."""
        self.exchange(swap=True)
        try:
            state = values.module_state_dict(self.engine)
        finally:
            self.exchange(swap=True)
        full = {f"module.{name}": value for name, value in state.items()}
        return {"n_averaged": self.n_averaged.clone(), **full} if full else {}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        self.n_averaged.copy_(state["n_averaged"])
        inner = {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}
        self.module.load_state_dict(inner, strict=strict)


class _AveragedModule:
    """Stands for ``AveragedModel.module``, which the callback loads plain checkpoints into."""

    def __init__(self, average: ShardedAverage) -> None:
        self._average = average

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        average = self._average
        average.exchange(swap=True)
        try:
            values.load_module_state_dict(average.engine, state, strict=strict)
        finally:
            average.exchange(swap=True)
        average.engine.settle()  # the current weights are loaded next


def attach(trainer: pl.Trainer) -> None:
    """Before setup hooks: averaging callbacks must not copy the plain module, nor touch parameters one by one."""
    for callback in _averaging(trainer):
        if trainer.state.fn == TrainerFn.FITTING:
            callback._average_model = None  # of an earlier fit
        callback.__dict__.update(
            {
                "setup": _set_up_later,
                "_swap_models": partial(_exchange, callback, swap=True),
                "_copy_average_to_current": partial(_exchange, callback, swap=False),
                "on_load_checkpoint": partial(_on_load_checkpoint, callback),
            }
        )


def average_shards(trainer: pl.Trainer, engine: Engine) -> None:
    """After sharding: give averaging callbacks a sharded copy."""
    for callback in _averaging(trainer):
        callback._average_model = ShardedAverage(  # type: ignore[assignment]
            engine, use_buffers=callback._use_buffers, device=callback._device, **callback._kwargs
        )
        if (checkpoint := callback.__dict__.pop(_WAITING, None)) is not None:
            assert trainer.lightning_module is not None
            _on_load_checkpoint(callback, trainer, trainer.lightning_module, checkpoint)


def let_go(trainer: pl.Trainer) -> None:
    """After the run: the callbacks are themselves again."""
    for callback in _averaging(trainer):
        for name in _PATCHED:
            callback.__dict__.pop(name, None)


def _averaging(trainer: pl.Trainer) -> list[WeightAveraging]:
    return [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]  # type: ignore[attr-defined]


# -- what stands for the callback's methods during a run ------------------------------------------------------------------


def _set_up_later(trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
    """Nothing: :func:`average_shards` does it after sharding."""


def _exchange(callback: WeightAveraging, pl_module: pl.LightningModule, *, swap: bool) -> None:
    _average_of(callback).exchange(swap=swap)


def _on_load_checkpoint(
    callback: WeightAveraging, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
) -> None:
    if callback._average_model is None:
        if trainer.state.fn == TrainerFn.FITTING:
            callback.__dict__[_WAITING] = checkpoint  # until there are shards
        else:
            type(callback).on_load_checkpoint(callback, trainer, pl_module, checkpoint)
        return
    engine = _average_of(callback).engine
    with values.loading_into_shards(engine):  # the callback calls pl_module.load_state_dict
        type(callback).on_load_checkpoint(callback, trainer, pl_module, checkpoint)
    engine.masters_changed()


def _average_of(callback: WeightAveraging) -> ShardedAverage:
    average: Any = callback._average_model
    if not isinstance(average, ShardedAverage) or engine_of(average.engine.module) is not average.engine:
        raise RuntimeError(
            f"the averages of {type(callback).__name__} belong to a run with another strategy or other settings. Give "
            "each Trainer a callback of its own."
        )
    return average
