"""Keep the metrics that a run logs in the run's folder, whatever loggers the run has, for the curves of its report."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_zero.engine import Engine
from lightning_zero.report.results import CURVES, Series, held_and_waits, lines_in, series_of
from lightning_zero.tiers.limits import lines_of
from lightning_zero.trainer.callbacks.monitor import batch_size, batches_at_once

SEEN = ("run/samples", "run/tokens")


class Curves(DummyLogger):
    """A logger that keeps all metrics in memory, and on rank 0 in the file ``curves.jsonl``, a line for each call.

    Like Lightning's DummyLogger, it accepts calls of any method, which users' code makes if it is the only logger.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.beside = folder, list[Logger]()
        self.lines = list(lines_in(folder))

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
        """Drop what an earlier run in this folder, or this run before it resumed, has logged after ``step``."""
        if self.lines:
            self.lines = [line for line in self.lines if step and line["step"] <= step]
            self._write("".join(f"{json.dumps(line)}\n" for line in self.lines), "w")

    @rank_zero_only
    def _write(self, text: str, mode: str) -> None:
        with contextlib.suppress(OSError), (self.folder / CURVES).open(mode) as file:  # a full disk ends no training
            file.write(text)

    @property
    def series(self) -> Series:
        return series_of(self.lines)


class Record(Callback):
    """Records a run for its report, with a logger of its own beside the user's loggers.

    Attributes:
        optimizers: class names of the optimizers.
        batch: numbers of samples and tokens in this rank's first training batch (0: unknown); None before.
        ranks: results of :func:`of_rank` on all ranks, gathered once at the end of a fit; empty before.
    """

    def __init__(self, folder: str) -> None:
        self.curves = Curves(Path(folder))
        self.optimizers: list[str] = []
        self.batch: tuple[int, int] | None = None
        self.ranks: list[dict[str, Any]] = []
        self._seen, self._steps, self._lr = dict.fromkeys(SEEN, 0.0), 0, dict[str, float]()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.curves not in trainer.loggers:
            self.curves.beside = list(trainer.loggers)
            trainer.loggers.append(self.curves)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.curves.start_at(trainer.fit_loop.epoch_loop._batches_that_stepped)
        self.optimizers = [type(optimizer).__name__ for optimizer in trainer.optimizers]
        self._steps, series = trainer.global_step, self.curves.series
        self._seen = {name: series[name][-1][1] if name in series else 0 for name in SEEN}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        groups = [optimizer.param_groups[0] for optimizer in trainer.optimizers]
        self._lr = {f"run/lr{number or ''}": float(group["lr"]) for number, group in enumerate(groups)}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sizes = batch_size(batch)
        self.batch = self.batch or sizes
        for name, size in zip(SEEN, sizes, strict=True):
            self._seen[name] += batches_at_once(trainer) * size
        step, every = trainer.fit_loop.epoch_loop._batches_that_stepped, getattr(trainer, "log_every_n_steps", 0)
        if trainer.global_step > self._steps and every and (step + 1) % every == 0:
            self.curves.log_metrics(self._lr | self.seen, step)
        self._steps = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine: Engine = trainer.strategy.engine  # type: ignore[attr-defined]
        own = of_rank(engine, self.curves.series)
        self.ranks = engine.comm.gather_checked(own, "the numbers of all ranks for the report of a run", patient=True)

    @property
    def seen(self) -> dict[str, float]:
        """Return how many samples and tokens all ranks have trained on, also before a restart. Omits unknown counts."""
        return {name: count for name, count in self._seen.items() if count}


def of_rank(engine: Engine, series: Series) -> dict[str, Any]:
    """Return this rank's host, device and peak memory, and its bytes and waits from the logged metrics ``series``."""
    accelerator = engine.comm.streams.accelerator
    cpu = re.search(r"^model name\s*: (.*)$", "\n".join(lines_of(Path("/proc/cpuinfo"))), re.MULTILINE)
    peak = re.search(r"^VmHWM:\s*(\d+) kB$", "\n".join(lines_of(Path("/proc/self/status"))), re.MULTILINE)
    return {
        "rank": engine.comm.rank,
        "host": socket.gethostname(),
        "device": f"{engine.comm.device}, {accelerator.name or (cpu[1] if cpu else 'unknown model')}",
        "peak_device": accelerator.peak_nbytes() if accelerator.has_streams else None,
        "peak_process": 1024 * int(peak[1]) if peak else None,
        **held_and_waits(series),
    }
