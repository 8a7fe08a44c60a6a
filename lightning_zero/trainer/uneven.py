"""Let ranks have different numbers of batches, by extending the data fetcher from which Lightning's loops take batches.

A training epoch ends on all ranks after the last batch that all ranks have or, with ``zero.uneven=join``, after the
last batch that any rank has. An evaluation continues until no rank has batches left. At stages that reshard, a rank
takes part in other ranks' steps, without running the module, if its next batch is of a later loader or it has none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn import SyncBatchNorm

from lightning_zero.lightning_api import PrefetchDataFetcher, sized_len
from lightning_zero.settings import ConfigError, Uneven
from lightning_zero.trainer.adapted import adapt

LAST = 2**31  # larger than any loader's index: this rank has no more batches


class EndsTogether(PrefetchDataFetcher):
    """Fetches training batches, and ends the epoch on all ranks together. If some rank does not know its number of
    batches, ranks exchange after each fetch whether they have a next batch."""

    strategy: Any
    most: int | None = None  # number of batches in an epoch
    limit: float = math.inf  # largest number of batches, from a loader that may have less
    ahead = said = over = False
    leaves = False  # the epoch leaves batches on some rank
    states: Sequence[Any] = ()  # of loaders, before the batch that was fetched ahead

    def reset(self) -> None:
        super().reset()
        self.states, self.over = [], False
        if self.most is not None:
            self.length, self.done = self.most, self.done or not self.most
        elif self.ahead:
            self.look_ahead()

    def look_ahead(self) -> None:
        """From now on fetch each batch one call earlier, to know when returning a batch whether it is the last one."""
        self.ahead = True
        if self.length is not None:
            self.limit, self.length = self.length, None

    @property
    def is_over(self) -> bool:
        return self.fetched - len(self.batches) >= self.limit

    def __iter__(self) -> Any:
        super().__iter__()
        self.agree()
        return self

    def __next__(self) -> Any:
        if self.done or self.over:  # on another rank, maybe
            self.done = True
            raise StopIteration
        batch = self.fetch()
        self.done = self.done or self.is_over
        self.agree()
        return batch

    def fetch(self) -> Any:
        if self.length is None:
            self.states = self.combined_loader._state_dicts()
        return super().__next__()

    def states_to_save(self, *, ended: bool) -> Sequence[Any]:
        """Return the loaders' states from which this rank resumes, not counting a batch that was fetched ahead. Return
        [] if the epoch is over (``ended``) and some rank had batches left."""
        if ended and self.leaves:
            return []
        return self.states if self.batches else self.combined_loader._state_dicts()

    def agree(self) -> None:
        """End the epoch if any rank has no batches left. Warn, once, if other ranks have batches left. Collective."""
        if self.most is not None:
            return
        out, more = self.strategy.engine.comm.max_(torch.tensor([self.done, not self.done], dtype=torch.int64)).tolist()
        self.leaves = bool(out and more)
        if out and more and not self.said:
            self.said = True
            table = self.strategy._gather_objects((self.fetched, self.done), "which rank has no more batches")
            _say({rank: f"{n - (not done)}{'' if done else ' and more'}" for rank, (n, done) in enumerate(table)})
        self.over = bool(out)
        # Below a limit that no rank reaches Lightning does not know the last batch, if all ranks have the same number.
        self.done = self.over if more or self.limit == math.inf else self.is_over


class Joins(EndsTogether):
    """Fetches batches for training with ``zero.uneven=join``. Until no rank has a batch left, a rank without batches
    repeats its last batch (if it had none, a batch of another rank) with weight 0."""

    item: Any = None  # the last batch of this epoch; after the first batch all ranks have one

    def __iter__(self) -> Any:
        super(EndsTogether, self).__iter__()
        self.item = None
        return self

    def __next__(self) -> Any:
        if self.item is None:  # not in __iter__: only after it a resumed loop counts the batches that it had fetched
            self.agree()
        if self.done:
            raise StopIteration
        having, first = self.having, self.item is None
        has = having[self.strategy.global_rank]
        if has:
            self.item = self.fetch()
        if first and not all(having):
            item = self.strategy.broadcast(self.item, having.index(1))
            self.item = self.item if has else item
        self._weigh(len(having) / sum(having) if has else 0.0)
        self.agree()
        return self.item

    @property
    def has_next(self) -> bool:
        return bool(self.batches) and not self.is_over if self.length is None else self.fetched < self.length

    def agree(self) -> None:
        """Find which ranks have a next batch (``having``), and end the epoch if none has. Collective."""
        having = torch.zeros(self.strategy.world_size, dtype=torch.int64)
        having[self.strategy.global_rank] = self.has_next
        self.having: list[int] = self.strategy.engine.comm.sum_(having).tolist()
        self.done = not any(self.having)
        self.leaves |= 0 < sum(self.having) < len(self.having)

    def states_to_save(self, *, ended: bool) -> Sequence[Any]:
        return super().states_to_save(ended=ended) if self.has_next or ended else []

    def _weigh(self, weight: float) -> None:
        if (tokens := self.strategy._steps.sequences.tokens) is not None:
            tokens.counts = weight > 0
        else:
            self.strategy.precision_plugin.batch_weight = weight


def _check_join(module: Any, fetcher: Any) -> None:
    for found, what, why in (
        (any(isinstance(part, SyncBatchNorm) for part in module.modules()), "SyncBatchNorm", "its statistics"),
        (not module.automatic_optimization, "manual optimization", "gradients of a plain loss.backward()"),
        (not isinstance(fetcher, PrefetchDataFetcher), "training_step(dataloader_iter)", "what the step fetches"),
    ):
        if found:
            raise ConfigError(
                f"zero.uneven: expected end with {what} (repeated batches would change {why}), got join. Set "
                "zero.uneven=end."
            )


def _say(batches: dict[int, Any]) -> None:
    found = ", ".join(f"{number} on rank {rank}" for rank, number in batches.items())
    rank_zero_warn(f"ranks have different numbers of batches ({found}): epochs end with the last batch that all have.")


def end_together(loop: Any) -> None:
    """Let all ranks end epochs together. ``loop``: a fit loop that has just set up its data. Raise ConfigError if its
    model cannot be trained with ``zero.uneven=join``. Collective."""
    trainer, fetcher = loop.trainer, loop._data_fetcher
    strategy = trainer.strategy
    states, is_out = strategy._checkpoints.loaders.take()
    if fetcher is None or strategy.world_size == 1:
        return
    joins = strategy.config.uneven is Uneven.join
    if joins:
        _check_join(strategy.lightning_module, fetcher)
    if not isinstance(fetcher, PrefetchDataFetcher) or isinstance(fetcher, EndsTogether):
        return
    strategy.precision_plugin.batch_weight = 1.0  # after an earlier fit
    known = math.inf not in _lengths(fetcher, [0] * len(fetcher.combined_loader.flattened))
    lengths = strategy._gather_objects(fetcher.length if known else None, "numbers of training batches")
    if None not in lengths:
        if len(set(lengths)) == 1:
            return
        if not joins:
            _say(dict(enumerate(lengths)))
    for kind in (EndsTogether, Joins) if joins else (EndsTogether,):
        adapt([fetcher], (kind,))
    ours: Any = fetcher
    ours.strategy, ours.states = strategy, states
    if None in lengths and ours.length is not None:  # else its first batch is here
        ours.look_ahead()
        with contextlib.suppress(StopIteration):
            ours.batches.append(super(PrefetchDataFetcher, ours).__next__())
    if is_out:
        ours.batches.clear()
    if joins:
        loop.max_batches = max(strategy._gather_objects(loop.max_batches, "most batches of an epoch"))
    elif None in lengths:
        ours.agree()
    else:
        loop.max_batches = ours.most = ours.length = min(lengths)
        ours.leaves = True
        ours.done = ours.fetched >= ours.most
    if None in lengths:
        return
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch not in (None, math.inf):
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def states_to_save(loop: Any) -> Sequence[Any] | None:
    """Return the states of this rank's loaders for a save, or None if their present states are to be saved."""
    if not isinstance(fetcher := loop._data_fetcher, EndsTogether):
        return None
    progress = loop.epoch_loop.batch_progress
    return fetcher.states_to_save(ended=progress.is_last_batch and progress.current.ready == progress.current.processed)


def _lengths(fetcher: Any, limits: Sequence[float]) -> list[float]:
    """Return each loader's entry in ``limits``; inf for a loader without a length, which may have fewer batches."""
    loaders = fetcher.combined_loader.flattened
    return [math.inf if sized_len(loader) is None else most for loader, most in zip(loaders, limits, strict=True)]


class ServesOthers(PrefetchDataFetcher):
    """Fetches batches for an evaluation at stages that reshard, if ranks have different numbers of batches."""

    strategy: Any
    key: str

    def __next__(self) -> Any:
        try:
            item = super().__next__()
        except StopIteration:
            item = None
        own = LAST if item is None else item[2]
        # Lightning reduces the metrics of a loader when the next begins, so all must be done with it.
        while self._first(own) != own:
            self.strategy._steps.evaluate_nothing(self.key)
        if item is None:
            self.strategy.engine.passes.order.apart = False
            raise StopIteration
        return item

    def _first(self, own: int) -> int:
        """Return the smallest index of a loader from which some rank's next batch comes; LAST if no rank has a batch.
        ``own``: the index of the loader of this rank's next batch. Collective."""
        passes = self.strategy.engine.passes
        high, low = passes.comm.max_(torch.tensor([own, -own], dtype=torch.int64)).tolist()
        passes.order.apart = high != -low
        return int(-low)


def serve_others(strategy: Any) -> None:
    """Let ranks have different numbers of batches in the evaluation that begins. Collective."""
    engine, trainer = strategy.engine, strategy.lightning_module.trainer
    if engine.comm.world_size == 1 or not any(unit.reshards for unit in engine.units):
        return
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    key = "predict_step" if trainer.predicting else "test_step" if trainer.testing else "validation_step"
    fetcher = loop._data_fetcher
    if isinstance(fetcher, PrefetchDataFetcher):
        lengths = strategy._gather_objects(_lengths(fetcher, loop.max_batches), "numbers of batches of an evaluation")
        if math.inf in lengths[0] or any(row != lengths[0] for row in lengths):
            adapt([fetcher], (ServesOthers,))
            ours: Any = fetcher
            ours.strategy, ours.key = strategy, key
