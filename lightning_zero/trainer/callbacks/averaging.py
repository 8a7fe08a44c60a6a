"""Lightning's WeightAveraging (and EMA) callbacks on shards.

The callback copies the whole module before it is sharded, and updates and swaps parameters one by one. Here its copy is
a copy of this rank's master shards, and updates and swaps run on these; checkpoints hold full tensors as they do
without sharding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_zero.config import CheckpointFormat
from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.home import ResidentHome, opened
from lightning_zero.engine.whole.restage import Follow, Move
from lightning_zero.engine.whole.state_dicts import keeping_frozen, loading_into_shards, sharded_state_dict
from lightning_zero.lightning_api import StochasticWeightAveraging, TrainerFn, WeightAveraging, pl
from lightning_zero.planning.placement import Tier

EXCLUDES_FROZEN = "lightning_zero_excludes_frozen"  # in a checkpoint
_WAITING = "_lightning_zero_checkpoint"  # a checkpoint that was loaded before there were shards
_PATCHED = ("setup", "_swap_models", "_copy_average_to_current", "on_load_checkpoint", _WAITING)


@contextlib.contextmanager
def masters(engine: Engine, *, changed: bool = False) -> Iterator[None]:
    """Have the masters of all buckets in memory, inside. The averages take as much memory anyway."""
    engine.settle()
    with contextlib.ExitStack() as stack:
        for bucket in engine.buckets:
            stack.enter_context(opened(bucket.home, changed=changed))
        yield


class _Tensors(nn.Module):
    """This rank's master shards as parameters, the module's buffers as buffers: what torch's AveragedModel averages."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        for i, bucket in enumerate(engine.buckets):
            self.register_parameter(str(i), nn.Parameter(bucket.master, requires_grad=False))
        for name, buffer in engine.module.named_buffers():
            self.register_buffer(name.replace(".", "/"), buffer)


class _AveragedTensors(_Tensors):
    """The averages. The callback loads plain checkpoints into them."""

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        self.load(state, strict)

    load: Callable[[Mapping[str, Any], bool], None]


class ShardedAverage(AveragedModel):
    """An ``AveragedModel`` of shards. Its state dict is that of an AveragedModel of the whole module."""

    @outside_autograd
    def __init__(self, engine: Engine, strategy: Any, *, use_buffers: bool, device: Any = None, **kwargs: Any) -> None:
        with masters(engine):
            super().__init__(_AveragedTensors(engine), device=device, use_buffers=use_buffers, **kwargs)  # type: ignore[no-untyped-call]
        self.engine = engine
        self._strategy = strategy
        self._homes: list[ResidentHome] = []  # of the averages, as they were saved last
        self._beside_masters = device is None
        self.swapped = False  # the model holds the averages, for a validation
        assert isinstance(self.module, _AveragedTensors)
        self.module.load = self._load

    @outside_autograd
    def update_parameters(self, model: nn.Module) -> None:
        self._begin_to_change()
        with masters(self.engine):
            current = _Tensors(self.engine)
            for average, now in zip(self.module.parameters(), current.parameters(), strict=True):
                average.data = average.data.to(now.dtype)  # a bucket that was frozen may have another since it is not
            super().update_parameters(current)

    @outside_autograd
    def exchange(self, *, swap: bool) -> None:
        """Put the averages into the model; with ``swap`` also the model's values into the averages."""
        self._begin_to_change()
        with masters(self.engine, changed=True):
            current = _Tensors(self.engine)
            tensors = (chain(t.parameters(), t.buffers()) for t in (self.module, current))
            for average, now in zip(*tensors, strict=True):
                previous = now.clone() if swap else None
                now.copy_(average)
                if previous is not None:
                    average.copy_(previous)
        self.engine.masters_changed()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """On all ranks: full tensors on rank 0, and nothing on others; where folders are saved, each rank's parts."""
        settings = self.engine.config.checkpoint
        save = getattr(self._strategy, "range_save", None)
        if settings.name is CheckpointFormat.sharded:
            state = self._own_state(trainable_only=settings.exclude_frozen)
        elif save is not None:
            state = self._with_own_buffers(save.copy_of_masters(self._make_homes()))
        else:
            self.exchange(swap=True)
            try:
                state = self.engine.state_dict(trainable_only=settings.exclude_frozen)
            finally:
                self.exchange(swap=True)
        full = {f"module.{name}": value for name, value in state.items()}
        return {"n_averaged": self.n_averaged.clone(), **full} if full else {}

    @outside_autograd
    def follow(self, number: int, move: Move) -> None:
        """Move the average of a bucket's masters with them, before they move."""
        average = self.module.get_parameter(str(number))
        device = average.device
        if self._beside_masters:
            device = self.engine.comm.device if move.plan.home_tier is Tier.device else torch.device("cpu")
        values = move.of(average.detach()).to(device)
        if values.untyped_storage().nbytes() != values.numel() * values.element_size():
            values = values.clone()  # else a part would keep the memory of the whole
        self.module.register_parameter(str(number), nn.Parameter(values, requires_grad=False))

    def _own_state(self, *, trainable_only: bool) -> dict[str, Any]:
        return self._with_own_buffers(
            sharded_state_dict(self.engine, self._make_homes(), trainable_only=trainable_only)
        )

    def _make_homes(self) -> list[ResidentHome]:
        self._homes = [ResidentHome(average.detach()) for average in self.module.parameters()]
        return self._homes

    def _begin_to_change(self) -> None:
        """Let who saves in the background copy the averages first."""
        for home in self._homes:
            home.open(to_write=True)
        self._homes = []

    def _with_own_buffers(self, state: dict[str, Any]) -> dict[str, Any]:
        for name, buffer in self.module.named_buffers():
            if (key := name.replace("/", ".")) in state:
                state[key] = buffer.detach().to("cpu", copy=True)
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        self.n_averaged.copy_(state["n_averaged"])
        self._load({name.removeprefix("module."): v for name, v in state.items() if name != "n_averaged"}, strict)

    def _load(self, state: Mapping[str, Any], strict: bool) -> None:
        self.exchange(swap=True)
        try:
            self.engine.load_state_dict(state, strict=strict)
        finally:
            self.exchange(swap=True)
        self.engine.settle()  # the current weights are loaded next


def attach(trainer: pl.Trainer) -> None:
    """Keep averaging callbacks from copying the plain module and from touching parameters. Before setup hooks."""
    for callback in _averaging(trainer):
        if trainer.state.fn == TrainerFn.FITTING:
            callback._average_model = None  # of an earlier fit
        callback.__dict__.update(
            {
                "setup": partial(_set_up_later, callback),
                "_swap_models": partial(_exchange, callback, swap=True),
                "_copy_average_to_current": partial(_exchange, callback, swap=False),
                "on_load_checkpoint": partial(_on_load_checkpoint, callback),
            }
        )


def average_shards(trainer: pl.Trainer, engine: Engine) -> None:
    """Give averaging callbacks a sharded copy, after the module was sharded."""
    for callback in _averaging(trainer):
        callback._average_model = ShardedAverage(  # type: ignore[assignment]
            engine, trainer.strategy, use_buffers=callback._use_buffers, device=callback._device, **callback._kwargs
        )
        if (checkpoint := callback.__dict__.pop(_WAITING, None)) is not None:
            assert trainer.lightning_module is not None
            _on_load_checkpoint(callback, trainer, trainer.lightning_module, checkpoint)


def current_weights(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights that training goes on with; the callback saves averages under their key."""
    weights: Mapping[str, Any] = checkpoint.get("current_model_state", checkpoint["state_dict"])
    return weights


@contextlib.contextmanager
def as_trained(trainer: pl.Trainer) -> Iterator[None]:
    """Have the model hold the trained weights and not the averages, inside. An exception leaves it so."""
    found = (callback._average_model for callback in _averaging(trainer))
    swapped = [average for average in found if isinstance(average, ShardedAverage) and average.swapped]
    for average in reversed(swapped):
        average.exchange(swap=True)
        average.swapped = False
    yield
    for average in swapped:
        average.exchange(swap=True)
        average.swapped = True


def followers(trainer: pl.Trainer, engine: Engine) -> list[Follow]:
    """What moves the averages of callbacks when the module of ``engine`` is restaged."""
    averaging: list[Any] = [*_averaging(trainer), *stochastic(trainer)]
    averages = (callback._average_model for callback in averaging)
    return [a.follow for a in averages if isinstance(a, ShardedAverage) and a.engine is engine]


def let_go(trainer: pl.Trainer) -> None:
    """Give the callbacks their own methods back, after the run."""
    for callback in _averaging(trainer):
        for name in _PATCHED:
            callback.__dict__.pop(name, None)


def _averaging(trainer: pl.Trainer) -> list[WeightAveraging]:
    return [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]  # type: ignore[attr-defined]


def stochastic(trainer: pl.Trainer) -> list[StochasticWeightAveraging]:
    return [c for c in trainer.callbacks if isinstance(c, StochasticWeightAveraging)]  # type: ignore[attr-defined]


# -- what stands for the callback's methods during a run --------------------------------------------------------------


def _set_up_later(callback: WeightAveraging, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
    """Run a subclass's own ``setup`` without the copy of the module, which :func:`average_shards` makes later."""
    with _no_copy(callback):
        try:
            type(callback).setup(callback, trainer, pl_module, stage)
        except AttributeError as error:
            if callback._average_model is None:
                error.add_note(
                    f"With a ZeRO strategy the averages of {type(callback).__name__} (_average_model) are made after "
                    "setup(), when the module is sharded. What needs them belongs into on_fit_start()."
                )
            raise


@contextlib.contextmanager
def _no_copy(callback: WeightAveraging) -> Iterator[None]:
    """Make Lightning's own ``setup`` do nothing to ``callback``, inside."""
    kept = WeightAveraging.__dict__["setup"]

    def setup(self: WeightAveraging, *args: Any, **kwargs: Any) -> None:
        if self is not callback:
            kept(self, *args, **kwargs)

    WeightAveraging.setup = setup  # type: ignore[method-assign]
    try:
        yield
    finally:
        WeightAveraging.setup = kept  # type: ignore[method-assign]


def _exchange(callback: WeightAveraging, pl_module: pl.LightningModule, *, swap: bool) -> None:
    average = _average_of(callback)
    average.exchange(swap=swap)
    average.swapped ^= swap


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
    if checkpoint.get(EXCLUDES_FROZEN):
        states = {key: checkpoint[key] for key in ("state_dict", "current_model_state") if key in checkpoint}
        checkpoint = checkpoint | {key: keeping_frozen(engine.module, state) for key, state in states.items()}
    with loading_into_shards(engine):  # the callback calls pl_module.load_state_dict
        type(callback).on_load_checkpoint(callback, trainer, pl_module, checkpoint)


def _average_of(callback: WeightAveraging) -> ShardedAverage:
    average: Any = callback._average_model
    if not isinstance(average, ShardedAverage) or engine_of(average.engine.module) is not average.engine:
        raise RuntimeError(
            f"the averages of {type(callback).__name__} belong to a run with another strategy or other settings. Give "
            "each Trainer a callback of its own."
        )
    return average
