"""Base class of the Trainer's strategy, with attributes that the other files about a run use."""

from __future__ import annotations

from typing import Any

from lightning_zero.engine import Engine, engine_of
from lightning_zero.lightning_api import pl
from lightning_zero.ranks.progress import LongWork
from lightning_zero.trainer.precision import ZeroPrecision
from lightning_zero.trainer.saves.checkpoint_files import CheckpointFiles
from lightning_zero.trainer.saves.random_numbers import RandomNumbers


class Run(CheckpointFiles, pl.strategies.ParallelStrategy):
    """Base class of :class:`~lightning_zero.ZeroStrategy`: gives access to a run's engine, precision plugin and
    Trainer, and tells whether to print tables and progress."""

    _asked_precision: Any  # ``zero.precision.name``, as it was given
    _random_numbers: RandomNumbers | None = None

    @property
    def engine(self) -> Engine:
        """Return the engine of the connected LightningModule; raise RuntimeError if the module is not sharded yet."""
        if (engine := self._engine_that_waits) is None:
            raise RuntimeError(
                "strategy.engine: expected a sharded LightningModule, got one that is not sharded yet. The strategy "
                "shards the module after the setup() and configure_model() hooks: use the engine in on_fit_start or "
                "later."
            )
        return engine

    @property
    def is_distributed(self) -> bool:
        """Return whether there are several ranks. (With False, Lightning would give all ranks the same data.)"""
        return self._n_ranks > 1

    @property
    def precision_plugin(self) -> ZeroPrecision:
        return self._precision_plugin if self._precision_plugin is not None else ZeroPrecision()  # type: ignore

    @precision_plugin.setter
    def precision_plugin(self, plugin: pl.plugins.precision.Precision | None) -> None:
        """Use ``plugin``'s settings in a ZeroPrecision. Raise ConfigError if ``zero.precision.name`` is different."""
        asked = self._asked_precision
        self._precision_plugin = None if plugin is None else ZeroPrecision.from_plugin(plugin, asked).attach(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._precision_plugin is not None:
            self.precision_plugin.attach(self)

    @property
    def _speaks_for_all(self) -> bool:
        """Return whether this process starts all ranks, on this host, so that an exception in it ends the whole run."""
        environment = self.cluster_environment
        return self.num_nodes == 1 and not (environment is not None and environment.creates_processes_externally)

    def _settings_of_front(self) -> dict[str, Any]:
        row, loss = self.precision_plugin.row, self.config.loss
        settings: dict[str, Any] = {"zero.precision.name": row.name, "zero.loss": loss.name}
        if (trainer := self._trainer_of_run) is not None:
            names = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val")
            settings |= {f"trainer.{name}": getattr(trainer, name) for name in names}
        return settings

    @property
    def _engine_that_waits(self) -> Engine | None:
        return engine_of(self.lightning_module) if self.lightning_module is not None else None

    @property
    def _trainer_of_run(self) -> Any:
        return self.lightning_module._trainer if self.lightning_module is not None else None

    @property
    def _shows_tables(self) -> bool:
        """Return whether this process prints tables, as rank 0 does if the Trainer has a ModelSummary callback."""
        callbacks = getattr(self._trainer_of_run, "callbacks", [])
        return self.is_global_zero and any(isinstance(c, pl.callbacks.ModelSummary) for c in callbacks)

    @property
    def _long_work(self) -> LongWork:
        """Return the progress display for long work, shown on rank 0 if the Trainer shows a progress bar."""
        trainer = self._trainer_of_run
        bar = trainer.progress_bar_callback if trainer is not None else None
        is_wanted = trainer is None or (bar is not None and not getattr(bar, "is_disabled", False))
        return LongWork(self.is_global_zero and is_wanted)

    def _write_file(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
