"""Run Lightning's StochasticWeightAveraging on master shards, as ``averaging.py`` does for WeightAveraging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_zero.engine import Engine
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.packed import is_packed
from lightning_zero.engine.whole import whole_params
from lightning_zero.engine.whole.whole_params import take_writes_over
from lightning_zero.lightning_api import StochasticWeightAveraging, TrainerFn, pl
from lightning_zero.trainer.adapted import is_ours
from lightning_zero.trainer.callbacks.averaging import NoAverageYet, ShardedAverage, masters, stochastic


class StochasticAverage(ShardedAverage):
    """The callback's ``_average_model``, made of shards. Its state dict is that of the whole module."""

    @outside_autograd
    def average(self, n_averaged: Tensor, avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Update the averages by element-wise ``avg_fn``, or the first time by copying the masters. Collective."""
        self._begin_to_change()
        take_writes_over(self.engine)
        with masters(self.engine):
            for own, bucket in zip(self.module.parameters(), self.engine.buckets, strict=True):
                own.data = own.data.to(bucket.master.dtype)  # thawing a bucket may change its dtype
                # Parameter by parameter, because the padding between parameters must stay zero.
                for f in bucket.owned_fragments():
                    part = slice(f.start, f.start + f.numel)
                    now = bucket.master[part].to(own.device)
                    kept = n_averaged == 0 or is_packed(bucket.params[f.index].param)  # bytes have no average
                    new = now if kept else avg_fn(own[part], now, n_averaged.to(own.device))
                    own[part].copy_(new)
        n_averaged += 1

    @outside_autograd
    def transfer(self) -> None:
        """Copy the averages into the model. Collective."""
        take_writes_over(self.engine)
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
    """Replace each StochasticWeightAveraging callback's average by a StochasticAverage, after sharding. Collective."""
    for callback in stochastic(trainer):
        waiting: Any = callback._average_model
        average = StochasticAverage(engine, trainer.strategy, use_buffers=False, device=callback._device)
        callback._average_model = average  # type: ignore[assignment]
        if isinstance(waiting, NoAverageYet) and waiting.loaded is not None:
            average.load_state_dict(waiting.loaded)


class AveragesShardsStochastically(StochasticWeightAveraging):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Under ZeroStrategy, do not copy the module: later :func:`average_shards` makes an average of shards."""
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
