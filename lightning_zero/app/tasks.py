"""Perform the task of a run (``fit``, ``validate``, ``test`` or ``predict``) and write its results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Callback, ModelCheckpoint

from lightning_zero.app.jobs import decided
from lightning_zero.app.schema import Task, TrainConfig
from lightning_zero.config import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = "results.json"  # in the run folder
SPOKEN = {"val_bits_per_byte": "validation bits per byte", "test_bits_per_byte": "test bits per byte"}


def perform(
    config: TrainConfig, trainer: Trainer, model: LightningModule, data: LightningDataModule, ckpt_path: str | None
) -> dict[str, float]:
    """Perform ``config.task`` and return its final metrics. Collective."""
    if config.task is Task.fit:
        return _fit(config, trainer, model, data, ckpt_path)
    settings: dict[str, Any] = {"datamodule": data, "ckpt_path": ckpt_path, "weights_only": config.weights_only}
    with decided(trainer, ckpt_path):
        if config.task is Task.predict:
            trainer.predict(model, return_predictions=False, **settings)
            return {}
        evaluate = trainer.validate if config.task is Task.validate else trainer.test
        results = evaluate(model, verbose=False, **settings)
    return {name: value for result in results for name, value in result.items()}


def _fit(
    config: TrainConfig, trainer: Trainer, model: LightningModule, data: LightningDataModule, ckpt_path: str | None
) -> dict[str, float]:
    with decided(trainer, ckpt_path):
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=config.weights_only)
    if trainer.is_global_zero and trainer.checkpoint_callback is not None:
        last = getattr(trainer.checkpoint_callback, "last_model_path", "")
        print(f"checkpoint: {os.path.relpath(last)}" if last else "no checkpoint was written")
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor and callback.best_model_path:
                print(f"best checkpoint: {os.path.relpath(callback.best_model_path)}, by {callback.monitor}")
    return _validated(trainer, model, data)


def _validated(trainer: Trainer, model: LightningModule, data: LightningDataModule) -> dict[str, float]:
    """Return the metrics of a validation after the last step, which runs now if it has not yet. Collective."""
    (last,) = (c for c in trainer.callbacks if isinstance(c, LastValidation))  # type: ignore[attr-defined]
    found: dict[str, float] | None = last.at_the_end(trainer)
    if found is None:
        with decided(trainer, None):  # keep the present weights
            results = trainer.validate(model, datamodule=data, verbose=False) if trainer.enable_validation else []
        found = {k: v for result in results for k, v in result.items()}
    return found


def check_vocabulary(model: LightningModule, data: LightningDataModule) -> None:
    """Raise ConfigError if the data has tokens that the model does not know."""
    known, there = getattr(model, "vocab_size", None), getattr(data, "vocab_size", None)
    if isinstance(known, int) and isinstance(there, int) and known < there:
        raise ConfigError(
            f"model: expected a vocabulary of at least {there} tokens, which the data has, got {known}. Change "
            "model.vocab_size (model.config.vocab_size of a model of transformers), or data.tokenizer."
        )


class WritePredictions(BasePredictionWriter):
    """Write ``rank-<rank>.pt``: a list of pairs (indices of data items, output of ``predict_step``)."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch")
        self.folder = folder
        self._written: list[tuple[Sequence[int] | None, Any]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        from lightning_utilities.core.apply_func import apply_to_collection

        on_host = apply_to_collection(prediction, torch.Tensor, lambda t: t.detach().cpu())
        self._written.append((list(batch_indices) if batch_indices is not None else None, on_host))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{trainer.global_rank}.pt"
        aside = path.with_suffix(".part")
        torch.save(self._written, aside)
        aside.replace(path)
        if trainer.is_global_zero:
            print(f"predictions: {os.path.relpath(self.folder)}", flush=True)
        self._written = []


class LastValidation(Callback):
    """Keep the metrics of the last validation of a fit, so that it is not repeated if no step followed.

    ``wanted``: a metric that the first validation (or sanity check) must log; otherwise all ranks raise ConfigError.
    """

    def __init__(self, wanted: str | None = None) -> None:
        self.wanted = wanted
        self._found: tuple[int, dict[str, float]] | None = None  # step, metrics

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.enable_validation:
            check_metric(self.wanted, {})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        results = trainer.fit_loop.epoch_loop.val_loop._results.metrics(on_step=False)
        found = {name: float(value) for name, value in results["log"].items()}
        if found or not trainer.sanity_checking:  # a module may log nothing in a sanity check
            check_metric(self.wanted, found)
        if not trainer.sanity_checking:
            self._found = trainer.global_step, found

    def at_the_end(self, trainer: Trainer) -> dict[str, float] | None:
        """Return the metrics of a validation after the last step, or ``None``."""
        if self._found is not None and self._found[0] == trainer.global_step:
            return self._found[1]
        return None


def check_metric(wanted: str | None, found: Mapping[str, float]) -> None:
    """Raise ConfigError if the metric that a sweep optimizes was not logged."""
    if wanted is not None and wanted not in found:
        close = nearest(wanted, found)
        raise ConfigError(
            f"optimized_metric: expected a metric that validation (or the task) logs, one of "
            f"{', '.join(sorted(found)) or '(nothing was logged)'}, got {wanted!r}. "
            f"{f'Write optimized_metric={close}' if close else 'Change optimized_metric'}."
        )


class LogSettings(Callback):
    """Pass the settings of a run to its loggers, which get those of model and data from Lightning."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = plain(settings)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams(self.settings)


def plain(value: Any) -> Any:
    """Convert a configuration for loggers: enum members become their names."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def report(config: TrainConfig, metrics: dict[str, float], overrides: list[str]) -> None:
    """Print the last lines of a run and write :data:`RESULTS`, on rank 0."""
    folder = Path(config.run_dir)
    print(f"logs: {os.path.relpath(folder)}")
    for name, value in metrics.items():
        if name not in SPOKEN:
            print(f"{name}: {value:.4f}")
    for name, words in SPOKEN.items():
        if name in metrics:
            print(f"{words}: {metrics[name]:.4f}", flush=True)
    if folder.is_dir():
        result = {"task": config.task.value, "tags": config.tags, "overrides": overrides, "metrics": metrics}
        aside = folder / f".{RESULTS}"
        aside.write_text(json.dumps(result, indent=2) + "\n")
        aside.replace(folder / RESULTS)


def optimized(config: TrainConfig, metrics: dict[str, float]) -> float | None:
    """Return the metric that a sweep optimizes. Raises ConfigError if it was not logged."""
    check_metric(config.optimized_metric, metrics)
    return None if config.optimized_metric is None else metrics[config.optimized_metric]
