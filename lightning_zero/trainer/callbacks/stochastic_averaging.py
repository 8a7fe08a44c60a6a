"""Lightning's StochasticWeightAveraging on shards.

The callback copies the whole module before it is sharded, and then averages and transfers parameters one by one. Here
its copy is one of this rank's master shards, as that of ``WeightAveraging`` is (``averaging.py``), and the callback's
own code does the rest: schedules, the epoch that renews batch norms, what is in checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from lightning_zero.engine import Engine
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.whole.shown import take_writes_over
from lightning_zero.lightning_api import StochasticWeightAveraging, TrainerFn, pl
from lightning_zero.trainer.callbacks.averaging import ShardedAverage, masters, stochastic

_WAITING = "_lightning_zero_average"  # of a checkpoint that was loaded before there were shards
_PATCHED = ("setup", "update_parameters", "transfer_weights", "_load_average_model_state", _WAITING)


class StochasticAverage(ShardedAverage):
    """What the callback has in ``_average_model``. Its state dict is that of the whole module."""

    @outside_autograd
    def average(self, n_averaged: Tensor, avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Let ``avg_fn``, which is element-wise, average the masters in; the first ones are taken as they are."""
        self._begin_to_change()
        take_writes_over(self.engine)
        with masters(self.engine):
            for own, bucket in zip(self.module.parameters(), self.engine.buckets, strict=True):
                own.data = own.data.to(bucket.master.dtype)  # a bucket that was frozen may have another since it is not
                # Parameter by parameter: what lies between them is zero and stays so, whatever ``avg_fn`` makes of it.
                for f in bucket.owned_fragments():
                    part = slice(f.start, f.start + f.numel)
                    now = bucket.master[part].to(own.device)
                    new = now if n_averaged == 0 else avg_fn(own[part], now, n_averaged.to(own.device))
                    own[part].copy_(new)
        n_averaged += 1

    @outside_autograd
    def transfer(self) -> None:
        """Give the averages to the model."""
        take_writes_over(self.engine)
        with masters(self.engine, changed=True):
            for own, bucket in zip(self.module.parameters(), self.engine.buckets, strict=True):
                bucket.master.copy_(own)
        self.engine.masters_changed()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        state = super().state_dict()
        return {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        self._load(state, strict)


def attach(trainer: pl.Trainer) -> None:
    """Keep the callbacks from copying the plain module and from touching parameters. Before setup hooks."""
    for callback in stochastic(trainer):
        if trainer.state.fn == TrainerFn.FITTING:
            callback._average_model = None  # of an earlier fit
        callback.__dict__.update(
            {
                "setup": partial(_set_up_later, callback),
                "update_parameters": _update_parameters,
                "transfer_weights": _transfer_weights,
                "_load_average_model_state": partial(_load_later, callback),
            }
        )


def average_shards(trainer: pl.Trainer, engine: Engine) -> None:
    """Give the callbacks a sharded copy, after the module was sharded."""
    for callback in stochastic(trainer):
        average = StochasticAverage(engine, trainer.strategy, use_buffers=False, device=callback._device)
        callback._average_model = average  # type: ignore[assignment]
        if (state := callback.__dict__.pop(_WAITING, None)) is not None:
            average.load_state_dict(state)


def let_go(trainer: pl.Trainer) -> None:
    """Give the callbacks their own methods back, after the run."""
    for callback in stochastic(trainer):
        for name in _PATCHED:
            callback.__dict__.pop(name, None)


# -- what stands for the callback's methods during a run --------------------------------------------------------------


def _set_up_later(callback: StochasticWeightAveraging, *args: Any, **kwargs: Any) -> None:
    """Run a subclass's own ``setup`` without the copy of the module, which :func:`average_shards` makes later."""
    with _no_copy(callback):
        type(callback).setup(callback, *args, **kwargs)


@contextlib.contextmanager
def _no_copy(callback: StochasticWeightAveraging) -> Iterator[None]:
    """Make Lightning's own ``setup`` do nothing to ``callback``, inside."""
    kept = StochasticWeightAveraging.__dict__["setup"]

    def setup(self: StochasticWeightAveraging, *args: Any, **kwargs: Any) -> None:
        if self is not callback:
            kept(self, *args, **kwargs)

    StochasticWeightAveraging.setup = setup  # type: ignore[method-assign]
    try:
        yield
    finally:
        StochasticWeightAveraging.setup = kept  # type: ignore[method-assign]


def _update_parameters(average: StochasticAverage, _: Any, n_averaged: Tensor, avg_fn: Any) -> None:
    average.average(n_averaged, avg_fn)


def _transfer_weights(average: StochasticAverage, _: Any) -> None:
    average.transfer()


def _load_later(callback: StochasticWeightAveraging, state: Any) -> None:
    if isinstance(callback._average_model, StochasticAverage):
        callback._average_model.load_state_dict(state)
    elif state is not None:
        callback.__dict__[_WAITING] = state
