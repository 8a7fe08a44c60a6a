"""Lightning's WeightAveraging (and EMA) callbacks on shards.

The callback copies the whole module before it is sharded, and updates and swaps parameters one by one. Here its copy is
a copy of this rank's master shards, and updates and swaps run on these; checkpoints hold full tensors as they do
without sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_swa_multi_avg_fn

from lightning_zero.engine import Engine, values
from lightning_zero.engine.engine import outside_autograd

_PATCHED = ("setup", "_swap_models", "_copy_average_to_current", "on_load_checkpoint")


class ShardedAverage:
    """Stands for the callback's ``AveragedModel``: same methods, on shards."""

    @outside_autograd
    def __init__(self, engine: Engine, *, use_buffers: bool, device: Any = None, **kwargs: Any) -> None:
        self._engine = engine
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
        self.module = self  # the callback calls _average_model.module.load_state_dict

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device if self._device is not None else tensor.device, copy=True)

    @outside_autograd
    def update_parameters(self, module: Any) -> None:
        engine = self._engine
        engine.settle()
        own, current = list(self._shards), [b.master for b in engine.buckets]
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
        """Put the averages into the model; with ``swap`` the model's values into the averages."""
        engine = self._engine
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
            state = values.module_state_dict(self._engine)
        finally:
            self.exchange(swap=True)
        full = {f"module.{name}": value for name, value in state.items()}
        return {"n_averaged": self.n_averaged.clone(), **full} if full else {}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        self.exchange(swap=True)
        try:
            inner = {k.removeprefix("module."): v for k, v in state.items() if k != "n_averaged"}
            values.load_module_state_dict(self._engine, inner, strict=strict)
        finally:
            self.exchange(swap=True)
        if "n_averaged" in state:
            self.n_averaged.copy_(state["n_averaged"])


def keep_off_plain_module(trainer: pl.Trainer) -> None:
    """Before setup hooks: averaging callbacks must not copy the unsharded module."""
    for callback in _averaging(trainer):
        callback.__dict__["setup"] = lambda trainer, pl_module, stage: None


def average_shards(trainer: pl.Trainer, engine: Engine) -> None:
    """After sharding: give averaging callbacks a sharded copy."""
    for callback in _averaging(trainer):
        average = ShardedAverage(
            engine, use_buffers=callback._use_buffers, device=callback._device, **callback._kwargs
        )
        callback._average_model = average  # type: ignore[assignment]
        callback.__dict__["_swap_models"] = lambda pl_module, a=average: a.exchange(swap=True)
        callback.__dict__["_copy_average_to_current"] = lambda pl_module, a=average: a.exchange(swap=False)
        callback.__dict__["on_load_checkpoint"] = _loader(callback, engine)


def _loader(callback: WeightAveraging, engine: Engine) -> Callable[..., None]:
    def on_load_checkpoint(trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        with values.loading_into_shards(engine):  # the callback calls pl_module.load_state_dict
            type(callback).on_load_checkpoint(callback, trainer, pl_module, checkpoint)

    return on_load_checkpoint


def let_go(trainer: pl.Trainer) -> None:
    """After the run: the callbacks are themselves again."""
    for callback in _averaging(trainer):
        for name in _PATCHED:
            callback.__dict__.pop(name, None)


def _averaging(trainer: pl.Trainer) -> list[WeightAveraging]:
    return [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]  # type: ignore[attr-defined]
