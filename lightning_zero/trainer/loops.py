"""Adapt a run's objects to ZeroStrategy. The Trainer's loops report each fetch to Interruptions and RandomNumbers."""

from __future__ import annotations

from typing import Any, cast

from lightning_zero.lightning_api import COLLECTIVE, FitLoop, TrainingEpochLoop
from lightning_zero.settings import ConfigError
from lightning_zero.trainer import uneven
from lightning_zero.trainer.adapted import adapt, is_ours
from lightning_zero.trainer.callbacks.averaging import AveragesShards, AveragesShardsStochastically
from lightning_zero.trainer.callbacks.parameters import FinetunesShards, PrunesShards
from lightning_zero.trainer.interruptions import Interruptions
from lightning_zero.trainer.saves.kept_files import KeepsFiles
from lightning_zero.trainer.saves.random_numbers import RandomNumbers
from lightning_zero.trainer.saves.range_saves import SavesByRanges


def _numbers(loop: Any) -> RandomNumbers | None:
    """Return the RandomNumbers object that watches the loop's fit; None if no fit is running under ZeroStrategy."""
    numbers: RandomNumbers | None = getattr(loop.trainer.strategy, "_random_numbers", None)
    return numbers if numbers is not None and numbers.watches else None


class ZeroFitLoop(FitLoop):
    def setup_data(self) -> None:
        numbers = _numbers(self)
        if numbers is None:
            super().setup_data()
        else:
            numbers.setup_data(super().setup_data)
        if is_ours(self.trainer):
            uneven.end_together(self)


class ZeroTrainingEpochLoop(TrainingEpochLoop):
    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing under ZeroStrategy, because ranks have just exchanged signals in ``advance``."""
        if not is_ours(self.trainer):
            super()._broadcast_sigterm_tensor()

    def advance(self, data_fetcher: Any) -> None:
        """Answer signals, then run Lightning's ``advance``. Signals are answered before a batch is fetched, because a
        stateful loader counts a fetched batch as used. Collective."""
        interruptions = cast(Interruptions | None, getattr(self.trainer.strategy, "_interruptions", None))
        if interruptions is not None:
            interruptions.before_batch()
        super().advance(data_fetcher)

    def on_run_start(self, data_fetcher: Any) -> None:
        numbers = _numbers(self)
        if numbers is None:
            super().on_run_start(data_fetcher)
        else:
            numbers.on_run_start(super().on_run_start, data_fetcher)

    def _on_before_fetch(self) -> None:
        if (numbers := _numbers(self)) is not None:
            numbers.on_before_fetch()
        super()._on_before_fetch()


ADAPTED = (
    SavesByRanges,
    ZeroFitLoop,
    ZeroTrainingEpochLoop,
    KeepsFiles,
    AveragesShards,
    AveragesShardsStochastically,
    FinetunesShards,
    PrunesShards,
)


def adapt_run(trainer: Any) -> None:
    """Give the Trainer, its loops and its callbacks subclasses with methods of this package; see ``adapted.py``."""
    adapt([trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop, *trainer.callbacks], ADAPTED)


def compare_callbacks(trainer: Any) -> None:
    """Raise ConfigError on all ranks if ranks have different callbacks among those that run collectives
    (:data:`COLLECTIVE`). Collective."""
    own = [kind.__name__ for kind in COLLECTIVE for callback in trainer.callbacks if isinstance(callback, kind)]
    found = trainer.strategy._gather_objects(", ".join(own) or "none", "the callbacks of the Trainer")
    for rank, names in enumerate(found):
        if names != found[0]:
            raise ConfigError(
                f"callbacks: expected the same collective callbacks on all ranks, got {found[0]} on rank 0 and {names} "
                f"on rank {rank}. Give all ranks the same callbacks, also in configure_callbacks."
            )
