"""Run Lightning's WeightAveraging (also EMA) and StochasticWeightAveraging callbacks on shards. An averaged model
holds averages of this rank's master shards. Checkpoints hold full tensors, as without sharding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.master_storage import ResidentStorage, opened
from lightning_zero.engine.units.packed import is_packed
from lightning_zero.engine.whole import whole_params
from lightning_zero.engine.whole.restage import Follow, Move
from lightning_zero.engine.whole.state_dicts import (
    keeping_frozen,
    loading_into_shards,
    parts_of_saved,
    sharded_state_dict,
)
from lightning_zero.lightning_api import StochasticWeightAveraging, TrainerFn, WeightAveraging, pl
from lightning_zero.planning.placement import Tier
from lightning_zero.settings import CheckpointFormat
from lightning_zero.trainer.adapted import is_ours

EXCLUDES_FROZEN = "lightning_zero_excludes_frozen"  # key in a checkpoint


@contextlib.contextmanager
def masters(engine: Engine, *, changed: bool = False) -> Iterator[None]:
    """Hold all of this rank's masters in memory during the body. ``changed``: whether the body writes to masters."""
    engine.passes.wait_for_all()
    with contextlib.ExitStack() as stack:
        if changed:
            stack.enter_context(engine.passes.after_step.changes.writing())
        for bucket in engine.buckets:
            stack.enter_context(opened(bucket.storage, changed=changed))
        yield


class _Tensors(nn.Module):
    """A module that torch's AveragedModel can average: its parameters are this rank's master shards, its buffers those
    of the sharded module."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        for i, bucket in enumerate(engine.buckets):
            self.register_parameter(str(i), nn.Parameter(bucket.master, requires_grad=False))
        for name, buffer in engine.module.named_buffers():
            self.register_buffer(name.replace(".", "/"), buffer)

    def __getattr__(self, name: str) -> Any:
        if name.isdigit() or "/" in name or name in self._buffers or name.startswith("_"):
            return super().__getattr__(name)
        raise AttributeError(
            f"_average_model.module.{name}: with a ZeRO strategy each rank holds shards of the averages, without "
            f"modules. Use {name} of the LightningModule, which has the averages during validation and after the fit."
        )


class ShardedAverage(AveragedModel):
    """An ``AveragedModel`` that averages shards. Its state dict is that of an AveragedModel of the whole module."""

    @outside_autograd
    def __init__(self, engine: Engine, strategy: Any, *, use_buffers: bool, device: Any = None, **kwargs: Any) -> None:
        with masters(engine):
            super().__init__(_Tensors(engine), device=device, use_buffers=use_buffers, **kwargs)  # type: ignore[no-untyped-call]
        self.engine = engine
        self._strategy = strategy
        self._storages: list[ResidentStorage] = []  # the averages that the last save reads, maybe in the background
        self._beside_masters = device is None
        # The callback loads a state dict of whole tensors into the averages.
        self.module.__dict__["load_state_dict"] = self._load

    @outside_autograd
    def update_parameters(self, model: nn.Module) -> None:
        self._begin_to_change()
        whole_params.take_writes_over(self.engine)
        with masters(self.engine):
            current = _Tensors(self.engine)
            for average, now in zip(self.module.parameters(), current.parameters(), strict=True):
                average.data = average.data.to(now.dtype)  # thawing a bucket may change its dtype
            super().update_parameters(current)
            for average, bucket in zip(self.module.parameters(), self.engine.buckets, strict=True):
                if any(is_packed(info.param) for info in bucket.params):  # bytes have no average
                    average.copy_(bucket.master)

    @outside_autograd
    def exchange(self, *, swap: bool) -> None:
        """Copy the averages into the model; with ``swap``, exchange them with the model's values. Collective."""
        self._begin_to_change()
        whole_params.take_writes_over(self.engine)
        with masters(self.engine, changed=True):
            current = _Tensors(self.engine)
            tensors = (chain(t.parameters(), t.buffers()) for t in (self.module, current))
            for average, now in zip(*tensors, strict=True):
                previous = now.clone() if swap else None
                now.copy_(average)
                if previous is not None:
                    average.copy_(previous)
        whole_params.masters_changed(self.engine)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the averages as full tensors, with values on rank 0 only. If checkpoints are folders, return each
        rank's own parts instead; if all ranks write ranges of one file, return tensors without values. Collective."""
        settings = self.engine.config.checkpoint
        save = self._strategy._checkpoints.range_save
        if settings.name is CheckpointFormat.sharded:
            storages = self._make_storages()
            state = sharded_state_dict(self.engine, storages, trainable_only=settings.exclude_frozen)
            state = self._with_own_buffers(state)
        elif save is not None:
            state = self._with_own_buffers(save.copy_of_masters(self._make_storages()))
        else:
            self.exchange(swap=True)
            try:
                state = self.engine.state_dict(trainable_only=settings.exclude_frozen)
            finally:
                self.exchange(swap=True)
        full = {f"module.{name}": value for name, value in state.items()}
        return {"n_averaged": self.n_averaged.clone(), **full}

    @outside_autograd
    def follow(self, number: int, move: Move) -> None:
        """Move the average of bucket ``number`` to the range and tier to which a restage moves the bucket's masters."""
        average = self.module.get_parameter(str(number))
        device = average.device
        if self._beside_masters:
            device = self.engine.comm.device if move.plan.storage_tier is Tier.device else torch.device("cpu")
        values = move.move_values(average.detach()).to(device)
        if values.untyped_storage().nbytes() != values.numel() * values.element_size():
            values = values.clone()  # a view would keep the whole storage alive
        self.module.register_parameter(str(number), nn.Parameter(values, requires_grad=False))

    def _make_storages(self) -> list[ResidentStorage]:
        self._storages = [ResidentStorage(average.detach()) for average in self.module.parameters()]
        return self._storages

    def _begin_to_change(self) -> None:
        """Wait until a background save has read the averages. Call this method before changing averages."""
        for storage in self._storages:
            storage.open(to_write=True)
        self._storages = []

    def _with_own_buffers(self, state: dict[str, Any]) -> dict[str, Any]:
        for name, buffer in self.module.named_buffers():
            if (key := name.replace("/", ".")) in state:
                state[key] = buffer.detach().to("cpu", copy=True)
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        self.n_averaged.copy_(state["n_averaged"])
        self._load({name.removeprefix("module."): v for name, v in state.items() if name != "n_averaged"}, strict)

    def _load(self, state: Mapping[str, Any], strict: bool = True) -> None:
        self.exchange(swap=True)
        try:
            self.engine.load_state_dict(state, strict=strict)
        finally:
            self.exchange(swap=True)
        self.engine.passes.wait_for_all()  # the current weights are loaded next


class StochasticAverage(ShardedAverage):
    """The average of a StochasticWeightAveraging callback, made of shards. Its state dict has the module's keys."""

    @outside_autograd
    def average(self, n_averaged: Tensor, avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Update the averages by element-wise ``avg_fn``; the first update copies the masters. Add 1 to ``n_averaged``.
        Collective."""
        self._begin_to_change()
        whole_params.take_writes_over(self.engine)
        with masters(self.engine):
            for own, bucket in zip(self.module.parameters(), self.engine.buckets, strict=True):
                own.data = own.data.to(bucket.master.dtype)  # thawing a bucket may change its dtype
                # Parameter by parameter, because the padding between parameters must stay zero.
                for f in bucket.owned_fragments():
                    part = slice(f.start, f.start + f.numel)
                    now = bucket.master[part].to(own.device)
                    kept = n_averaged == 0 or is_packed(bucket.params[f.index].param)  # packed bytes have no average
                    new = now if kept else avg_fn(own[part], now, n_averaged.to(own.device))
                    own[part].copy_(new)
        n_averaged += 1

    @outside_autograd
    def transfer(self) -> None:
        """Copy the averages into the model. Collective."""
        whole_params.take_writes_over(self.engine)
        with masters(self.engine, changed=True):
            for own, bucket in zip(self.module.parameters(), self.engine.buckets, strict=True):
                bucket.master.copy_(own)
        whole_params.masters_changed(self.engine)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        state = super().state_dict()
        return {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        self._load(state, strict)


def average_shards(trainer: pl.Trainer, engine: Engine) -> None:
    """After sharding, replace each averaging callback's average by an average of shards. If the run resumes, load the
    checkpoint's averages. Collective."""
    for stochastic in _stochastic(trainer):
        waiting: Any = stochastic._average_model
        average = StochasticAverage(engine, trainer.strategy, use_buffers=False, device=stochastic._device)
        stochastic._average_model = average  # type: ignore[assignment]
        if isinstance(waiting, NoAverageYet) and waiting.loaded is not None:
            average.load_state_dict(waiting.loaded)
    for callback in _averaging(trainer):
        waiting = callback._average_model
        callback._average_model = ShardedAverage(  # type: ignore[assignment]
            engine, trainer.strategy, use_buffers=callback._use_buffers, device=callback._device, **callback._kwargs
        )
        if isinstance(waiting, NoAverageYet) and waiting.loaded is not None:
            callback.on_load_checkpoint(trainer, trainer.lightning_module, waiting.loaded)


def followers(trainer: pl.Trainer, engine: Engine) -> list[Follow]:
    """Return the functions that move callbacks' averages when ``engine`` is restaged."""
    averaging: list[Any] = [*_averaging(trainer), *_stochastic(trainer)]
    averages = (callback._average_model for callback in averaging)
    return [a.follow for a in averages if isinstance(a, ShardedAverage) and a.engine is engine]


def _averaging(trainer: pl.Trainer) -> list[WeightAveraging]:
    return [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]  # type: ignore[attr-defined]


def _stochastic(trainer: pl.Trainer) -> list[StochasticWeightAveraging]:
    return [c for c in trainer.callbacks if isinstance(c, StochasticWeightAveraging)]  # type: ignore[attr-defined]


# -- the callback -----------------------------------------------------------------------------------------------------


class NoAverageYet:
    """Placeholder for a callback's average until the module is sharded. ``loaded``: the state to load then, or None."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"_average_model.{name}: with a ZeRO strategy the averages are made after setup(), when the module is "
            "sharded. Use them in on_fit_start() or later."
        )


class AveragesShards(WeightAveraging):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Under ZeroStrategy do not copy the module, because :func:`average_shards` will make an average of shards."""
        if not is_ours(trainer):
            super().setup(trainer, pl_module, stage)
        elif stage == "fit":
            self._average_model = NoAverageYet()  # type: ignore[assignment]

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        if (average := self._sharded) is not None:
            average.exchange(swap=True)
        else:
            super()._swap_models(pl_module)

    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        if (average := self._sharded) is not None:
            average.exchange(swap=False)
        else:
            super()._copy_average_to_current(pl_module)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if isinstance(self._average_model, NoAverageYet):
            self._average_model.loaded = checkpoint
            return
        if (average := self._sharded) is None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
            return
        if checkpoint.get(EXCLUDES_FROZEN):
            states = {key: checkpoint[key] for key in ("state_dict", "current_model_state") if key in checkpoint}
            module = average.engine.module
            checkpoint = checkpoint | {key: keeping_frozen(module, state) for key, state in states.items()}
        if (state := checkpoint.get("current_model_state")) is not None:
            checkpoint = checkpoint | {"current_model_state": parts_of_saved(average.engine, state)}
        with loading_into_shards(average.engine):  # the callback calls pl_module.load_state_dict
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    @property
    def _sharded(self) -> ShardedAverage | None:
        """Return the average, or None if it is not sharded. Raise RuntimeError if its module has a new engine."""
        average: Any = self._average_model
        if not isinstance(average, ShardedAverage):
            return None
        if engine_of(average.engine.module) is not average.engine:
            raise RuntimeError(
                f"{type(self).__name__}: expected a new callback, got one with averages of a run with another strategy "
                "or other settings. Create a callback for each Trainer."
            )
        return average


class AveragesShardsStochastically(StochasticWeightAveraging):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Under ZeroStrategy do not copy the module, because :func:`average_shards` will make an average of shards."""
        if not is_ours(trainer):
            super().setup(trainer, pl_module, stage)
        elif trainer.state.fn == TrainerFn.FITTING:
            self._average_model = NoAverageYet()  # type: ignore[assignment]

    @staticmethod
    def update_parameters(average_model: Any, model: Any, n_averaged: Tensor, avg_fn: Any) -> None:
        if isinstance(average_model, StochasticAverage):
            average_model.average(n_averaged, avg_fn)
        else:
            StochasticWeightAveraging.update_parameters(average_model, model, n_averaged, avg_fn)

    @staticmethod
    def transfer_weights(src_pl_module: Any, dst_pl_module: Any) -> None:
        if isinstance(src_pl_module, StochasticAverage):
            src_pl_module.transfer()
        else:
            StochasticWeightAveraging.transfer_weights(src_pl_module, dst_pl_module)
