"""Perform the task of a run (``fit``, ``validate``, ``test`` or ``predict``) and write its results."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Callback, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_zero.app.jobs import command_to_go_on, decided
from lightning_zero.app.schema import Task, TrainConfig
from lightning_zero.ranks.rendezvous import versions
from lightning_zero.ranks.resume import newest_checkpoint
from lightning_zero.report import results
from lightning_zero.report.record import Record, of_rank
from lightning_zero.settings import ConfigError, change
from lightning_zero.trainer.callbacks.monitor import batches_at_once
from lightning_zero.trainer.strategy import ZeroStrategy
from lightning_zero.trainer.summary import setup_of

SPOKEN = {"val_bits_per_byte": "validation bits per byte", "test_bits_per_byte": "test bits per byte"}


def perform(
    config: TrainConfig, trainer: Trainer, model: LightningModule, data: LightningDataModule, ckpt_path: str | None
) -> dict[str, float]:
    """Perform ``config.task`` and return its final metrics. Collective."""
    settings: dict[str, Any] = {"datamodule": data, "ckpt_path": ckpt_path, "weights_only": config.weights_only}
    if config.task is Task.fit:
        with decided(trainer, ckpt_path):
            trainer.fit(model, **settings)
        return _validated(trainer, model, data)
    with decided(trainer, ckpt_path):
        if config.task is Task.predict:
            trainer.predict(model, return_predictions=False, **settings)
            return {}
        evaluate = trainer.validate if config.task is Task.validate else trainer.test
        rows = evaluate(model, verbose=False, **settings)
    return {name: value for row in rows for name, value in row.items()}


def _validated(trainer: Trainer, model: LightningModule, data: LightningDataModule) -> dict[str, float]:
    """Return the final weights' validation metrics. Validate if steps followed the last validation. Collective."""
    (last,) = (c for c in trainer.callbacks if isinstance(c, LastValidation))  # type: ignore[attr-defined]
    if last.found is not None and last.found[0] == trainer.global_step:
        return last.found[1]
    with decided(trainer, None):  # keep the present weights
        rows = trainer.validate(model, datamodule=data, verbose=False) if trainer.enable_validation else []
    return {k: v for row in rows for k, v in row.items()}


def check_vocabulary(model: LightningModule, data: LightningDataModule) -> None:
    """Raise ConfigError if the vocabulary of the data is larger than that of the model."""
    known, there = getattr(model, "vocab_size", None), getattr(data, "vocab_size", None)
    if isinstance(known, int) and isinstance(there, int) and known < there:
        raise ConfigError(
            f"model.vocab_size: expected at least {there}, the number of tokens of the data, got {known}. Change "
            "model.vocab_size (model.config.vocab_size of a model of transformers), or data.tokenizer."
        )


class WritePredictions(BasePredictionWriter):
    """Writes each rank's predictions to ``rank-<rank>.pt``, as pairs (indices of items, output of ``predict_step``)."""

    def __init__(self, folder: Path) -> None:
        super().__init__("epoch")
        self.folder = folder

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{trainer.global_rank}.pt"
        aside = path.with_suffix(".part")
        loaders = predictions if len(batch_indices) > 1 else [predictions]
        parts = (zip_longest(*part) for part in zip(batch_indices, loaders, strict=True))  # no indices: None
        torch.save([pair for part in parts for pair in part], aside)
        aside.replace(path)
        if trainer.is_global_zero:
            print(f"predictions: {os.path.relpath(self.folder)}", flush=True)


class LastValidation(Callback):
    """Keeps the metrics of the last validation of a fit, so that validation is not repeated at the end.

    If the first validation (or sanity check) does not log the metric ``wanted``, all ranks raise ConfigError.
    """

    def __init__(self, wanted: str | None = None) -> None:
        self.wanted = wanted
        self.found: tuple[int, dict[str, float]] | None = None  # step, metrics

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.enable_validation:
            check_metric(self.wanted, {})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        logged = trainer.fit_loop.epoch_loop.val_loop._results.metrics(on_step=False)
        found = {name: float(value) for name, value in logged["log"].items()}
        if found or not trainer.sanity_checking:  # a module may log nothing in a sanity check
            check_metric(self.wanted, found)
        if not trainer.sanity_checking:
            self.found = trainer.global_step, found


def check_metric(wanted: str | None, found: Mapping[str, float]) -> None:
    """Raise ConfigError if ``wanted``, the metric that a sweep optimizes, is not in ``found``, the logged metrics."""
    if wanted is not None and wanted not in found:
        raise ConfigError(
            f"optimized_metric: expected a metric that validation (or the task) logs, one of "
            f"{', '.join(sorted(found)) or '(nothing was logged)'}, got {wanted!r}. "
            f"{change('optimized_metric=', wanted, found, 'optimized_metric')}"
        )


class LogSettings(Callback):
    """Passes all settings of a run to its loggers. Lightning alone passes only those of model and data."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = plain(settings)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams(self.settings)


def plain(value: Any) -> Any:
    """Return the configuration ``value`` as loggers take it, with enum members replaced by their names."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


@contextlib.contextmanager
def reported(config: TrainConfig, trainer: Trainer, arguments: list[str]) -> Iterator[dict[str, float]]:
    """Yield a dictionary for the body to fill with the task's metrics. Then print and write results on rank 0.

    Results are also written if a fit is interrupted or fails after its first step. An error in writing is only printed.
    """
    metrics: dict[str, float] = {}
    begun, status = time.time(), "finished"
    try:
        yield metrics
    except BaseException as error:
        status = (
            "interrupted"
            if isinstance(error, SystemExit)
            else f"failed: {type(error).__name__}: {error}".split("\n")[0]
        )
        raise
    finally:
        if trainer.is_global_zero and (status == "finished" or trainer.global_step):
            try:
                _report(config, trainer, arguments, metrics, status, begun)
            except Exception as error:
                print(f"no report was written: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _report(
    config: TrainConfig, trainer: Trainer, arguments: list[str], metrics: dict[str, float], status: str, begun: float
) -> None:
    """Print the last lines of a run, and write its results to the run folder. After a fit, also write plot and page."""
    folder, finished = Path(config.run_dir), status == "finished"
    checkpoint, best = _checkpoints(trainer, folder, begun) if config.task is Task.fit else (config.ckpt_path, None)
    if config.task is Task.fit and finished:
        at_end = (
            ": all steps were done before; raise trainer.max_steps (or max_epochs)"
            if trainer.fit_loop.restarting
            else ""
        )
        print(f"checkpoint: {checkpoint or f'none was written{at_end}'}{f', best: {best}' if best else ''}")
    if finished:
        print(f"logs: {os.path.relpath(folder)}")
    for name, value in sorted(metrics.items(), key=lambda metric: metric[0] in SPOKEN):
        print(f"{SPOKEN.get(name, name)}: {value:.4f}", flush=True)
    if not folder.is_dir():
        return
    (record,) = (c for c in trainer.callbacks if isinstance(c, Record))  # type: ignore[attr-defined]
    series = record.curves.series
    strategy = cast(ZeroStrategy, trainer.strategy)
    found = {
        "task": config.task.value,
        "status": status,
        "tags": config.tags,
        "overrides": arguments,
        "metrics": metrics if finished else None,
        "steps": trainer.global_step,
        "duration_s": time.time() - begun,
        "setup": setup_of(strategy.engine),
        "configuration": configuration(config, trainer, record),
        "seen": {f"{name.removeprefix('run/')} seen": int(count) for name, count in record.seen.items()},
        **results.measured(series, strategy.run_plan.held, record.ranks or [of_rank(strategy.engine, series)]),
        "checkpoint": checkpoint,
        "best_checkpoint": best,
        "command": shlex.join(["python", "-m", "lightning_zero.train", *sys.argv[1:]]),
        "next": _next(trainer, checkpoint, finished=finished) if config.task is Task.fit and checkpoint else None,
        "commit": results.commit(),
        "versions": versions(lightning.__version__),
    }
    results.write(folder, found, series, config.zero.timeline)
    if finished and found["next"]:
        print(f"next: {found['next']}", flush=True)


def configuration(config: TrainConfig, trainer: Trainer, record: Record) -> dict[str, str | int]:
    """Return a run's model, data, optimizer, hosts, seed and batch sizes, as entries of results.json."""
    parts = {name: _called(getattr(config, name)) for name in ("model", "data", "optimizer")}
    if [parts["optimizer"].partition("(")[0]] != record.optimizers:  # the module makes its own
        parts["optimizer"] = ", ".join(record.optimizers)
    hosts = Counter((rank["host"], rank["device"].partition(", ")[2]) for rank in record.ranks)
    machines = ", ".join(f"{host} ({count} x {device})" for (host, device), count in hosts.items())
    sizes = {name: size for name, size in zip(("samples", "tokens"), record.batch or (), strict=False) if size}
    accumulated = trainer.accumulate_grad_batches
    at_once = accumulated * batches_at_once(trainer)
    return {
        **{name: text for name, text in parts.items() if text},
        **({"hosts": machines} if machines else {}),
        "seed": config.seed,
        **{f"{name} per batch and rank": size for name, size in sizes.items()},
        "accumulated batches per step": accumulated,
        **{f"{name} per step, all ranks": size * at_once for name, size in sizes.items()},
    }


def _called(node: Mapping[str, Any]) -> str:
    """Format a config group as a Python call: ``AdamW(lr=0.001)``; "" without ``_target_``."""
    values = ", ".join(f"{key}={value!r}" for key, value in plain(node).items() if not key.startswith("_"))
    return f"{str(node['_target_']).rpartition('.')[2]}({values})" if "_target_" in node else ""


def _checkpoints(trainer: Trainer, folder: Path, begun: float) -> tuple[str | None, str | None]:
    """Return the paths of a fit's last checkpoint, and of the best one if a callback monitored a metric."""
    saves = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    newest = newest_checkpoint([folder, *(c.dirpath for c in saves if c.dirpath)], since_ns=int(1e9 * begun))
    last = [c.last_model_path for c in saves if newest is None or os.path.realpath(c.last_model_path) == str(newest)]
    best = [c.best_model_path for c in saves if c.monitor]
    return _first([*last, str(newest or "")]), _first(best)


def _first(paths: list[str]) -> str | None:
    return next((os.path.relpath(path) for path in paths if path), None)


def _next(trainer: Trainer, checkpoint: str, *, finished: bool) -> str | None:
    """Return the command that tests a finished fit (None if there is no test), or that continues an unfinished fit."""
    given = [a for a in sys.argv[1:] if not re.match(r"(hydra\.|(hparams_search|optimized_metric)=)", a.lstrip("+"))]
    if not finished:
        return command_to_go_on(given, checkpoint)
    parts = {"test_step": trainer.lightning_module, "test_dataloader": cast(Any, trainer).datamodule}
    if all(is_overridden(name, part) for name, part in parts.items()):
        return command_to_go_on([*given, "task=test"], checkpoint)
    return None


def optimized(config: TrainConfig, metrics: dict[str, float]) -> float | None:
    """Return the metric ``config.optimized_metric``; None if unset. Raise ConfigError if it was not logged."""
    check_metric(config.optimized_metric, metrics)
    return None if config.optimized_metric is None else metrics[config.optimized_metric]
