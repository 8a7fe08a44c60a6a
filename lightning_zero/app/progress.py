"""Callbacks of the main job: how long it will take, and what its last validation has found."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_zero.config import ConfigError, nearest

AFTER_S = 8.0  # of steps that are measured


class AnnounceTime(Callback):
    """Prints once, on rank 0, how long training will take. Nothing where nobody knows the number of steps."""

    def __init__(self) -> None:
        self._from: tuple[int, float] | None = None  # step and time that are measured from
        self._said = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._from, self._said = None, not trainer.is_global_zero

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._from = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._said:
            return
        step, now = trainer.global_step, time.monotonic()
        if self._from is None:
            if step:  # the first step is no measure: it makes optimizer state, and ranks learn their order
                self._from = step, now
            return
        steps, seconds = step - self._from[0], now - self._from[1]
        if not steps or seconds < AFTER_S:
            return
        self._said = True
        total = trainer.estimated_stepping_batches
        if math.isfinite(total) and total > step:
            rate = steps / seconds
            left = duration((total - step) / rate)
            print(f"\nabout {left} of training left: {total - step:.0f} steps at {rate:.2g} a second", flush=True)


def duration(seconds: float) -> str:
    """``90`` -> ``1.5 minutes``."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * unit:
            return f"{seconds / unit:.2g} {name}" if seconds < 10 * unit else f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"


class LastValidation(Callback):
    """Keeps what the last validation of a fit has logged: where no step came after it, a further one says the same.

    Args:
        wanted: refuse a run whose first validation, the sanity check if there is one, does not log this metric.

    Raises:
        ConfigError: on all ranks, in a run.
    """

    def __init__(self, wanted: str | None = None) -> None:
        self.wanted = wanted
        self._found: tuple[int, dict[str, float]] | None = None  # step, metrics

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.enable_validation:
            check_metric(self.wanted, {})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        results = trainer.fit_loop.epoch_loop.val_loop._results.metrics(on_step=False)
        found = {name: float(value) for name, value in results["log"].items()}
        if found or not trainer.sanity_checking:  # a module may leave out all logging in a sanity check
            check_metric(self.wanted, found)
        if not trainer.sanity_checking:
            self._found = trainer.global_step, found

    def at_the_end(self, trainer: pl.Trainer) -> dict[str, float] | None:
        """The metrics of a validation behind the last step; ``None`` where there was none."""
        if self._found is not None and self._found[0] == trainer.global_step:
            return self._found[1]
        return None


def check_metric(wanted: str | None, found: Mapping[str, float]) -> None:
    """
    Raises:
        ConfigError: a sweep looks at a metric of a name that was not logged.
    """
    if wanted is not None and wanted not in found:
        close = nearest(wanted, found)
        raise ConfigError(
            f"optimized_metric: expected a metric that validation (or the task) logs, one of "
            f"{', '.join(sorted(found)) or '(nothing was logged)'}, got {wanted!r}. "
            f"{f'Write optimized_metric={close}' if close else 'Change optimized_metric'}."
        )
