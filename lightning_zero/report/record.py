"""Keep what a run logs in the run's own folder, whatever loggers the run has: the curves of its report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

CURVES = "curves.jsonl"
Series = dict[str, list[tuple[int, float]]]  # for each metric pairs (step, value)


class Curves(DummyLogger):
    """A logger that keeps all metrics in memory, and on rank 0 in the file ``curves.jsonl``, a line for each call.

    As the only logger of a Trainer it answers every call of a user's code, as Lightning's DummyLogger does.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.beside = folder, list[Logger]()
        self.lines = list(_lines(folder / CURVES))

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @property
    def version(self) -> Any:  # the progress bar joins those of all loggers that differ
        return self.beside[0].version if self.beside else ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "epoch"}
        self.lines.append({**numbers, "step": int(step or 0)})
        self._write(f"{json.dumps(self.lines[-1])}\n", "a")

    def start_at(self, step: int) -> None:
        """Forget what an earlier run in this folder, or this one before it was interrupted, logged after ``step``."""
        if self.lines:
            self.lines = [line for line in self.lines if step and line["step"] <= step]
            self._write("".join(f"{json.dumps(line)}\n" for line in self.lines), "w")

    @rank_zero_only
    def _write(self, text: str, mode: str) -> None:
        with contextlib.suppress(OSError), (self.folder / CURVES).open(mode) as file:  # a full disk ends no training
            file.write(text)

    @property
    def series(self) -> Series:
        found: dict[str, dict[int, float]] = {}
        for line in self.lines:
            for name in line.keys() - {"step"}:
                found.setdefault(name, {})[line["step"]] = line[name]
        return {name: sorted(found[name].items()) for name in sorted(found)}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of curves, without one that a killed process has left half written."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


class Record(Callback):
    """Records a run for its report, by a logger beside those of the user."""

    def __init__(self, folder: str) -> None:
        self.curves = Curves(Path(folder))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.curves not in trainer.loggers:
            self.curves.beside = list(trainer.loggers)
            trainer.loggers.append(self.curves)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.curves.start_at(trainer.fit_loop.epoch_loop._batches_that_stepped)
