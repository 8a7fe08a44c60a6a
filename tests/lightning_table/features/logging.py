"""What is logged, and by whom."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger, Logger, rank_zero_experiment
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from tests.lightning_table.bench import Bench
from tests.lightning_table.table import heading
from tests.trainer.toys import Lit, seeded

feature = heading("Logging")


class Logs(Lit):
    """In every way, a value that differs by rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        own = float(dist.get_rank())
        self.log("bar", loss, prog_bar=True, logger=False)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("synced", own, sync_dist=True, on_epoch=True)
        for name in ("min", "max", "sum", "mean"):
            self.log(name, own + batch_idx, sync_dist=True, reduce_fx=name, on_step=False, on_epoch=True)
        self.log_dict({"a": own, "b": loss.detach()}, sync_dist=True, batch_size=len(batch[0]))
        self.log("zero", 1.0, rank_zero_only=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("hook", 2.0)

    def on_train_epoch_end(self) -> None:
        self.log("epoch end", float(self.current_epoch), sync_dist=True)


@feature("self.log, self.log_dict: on_step, on_epoch, prog_bar, sync_dist, reduce_fx, rank_zero_only")
def log(bench: Bench) -> Any:
    """callback_metrics, logged_metrics, progress_bar_metrics of each rank, what a logger gets"""
    ran, rows = bench.logged(seeded(Logs))
    metrics = (ran.trainer.logged_metrics, ran.trainer.progress_bar_metrics)
    return ran.seen, [{k: float(v) for k, v in sorted(m.items())} for m in metrics], rows


class Distance(Metric):
    """A metric with a network, as FID, LPIPS and BERTScore are."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).eval().requires_grad_(False)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, x: torch.Tensor) -> None:
        self.total += self.net(x).double().square().sum()
        self.seen.append(x)

    def compute(self) -> torch.Tensor:
        return self.total / len(dim_zero_cat(self.seen))


@feature("torchmetrics as submodules", fit={"ddp": {"find_unused_parameters": True}})
class Measures(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.distance, self.more = Distance(), MetricCollection([Distance(), MeanMetric()])
        self.train_mse = MeanSquaredError()
        self.val_metrics = MetricCollection({"mse": MeanSquaredError(), "mean": MeanMetric()}, prefix="val_")
        self.val_metrics.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.train_mse(self(batch[0]), batch[1])
        self.distance.update(batch[1])
        self.log_dict({"train_mse": self.train_mse, "distance": self.distance}, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.more.update(batch[1])
        self.log_dict(dict(self.more.items()))
        self.val_metrics["mse"].update(out, batch[1])
        self.val_metrics["mean"].update(out)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.to(self.device)  # changes nothing


@feature("CSVLogger")
def csv_logger(bench: Bench) -> Any:
    """What is in its files"""
    return bench.logged()[1], (bench.root / "hparams.yaml").read_text(), bench.files()


class Keeps(Logger):
    """One of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    name, version = "keeps", 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.calls.append((step, sorted(metrics)))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        self.calls.append(sorted(params))

    def finalize(self, status: str) -> None:
        self.calls.append(status)


@feature("a custom Logger, several loggers")
def own_logger(bench: Bench) -> Any:
    """All calls of each rank, files"""
    logger = Keeps()
    for name in ("log_graph", "save", "after_save_checkpoint"):
        setattr(logger, name, lambda *_, name=name: logger.calls.append(name))
    others = [CSVLogger(bench.root, name="", version=""), DummyLogger()]
    bench.fit(seeded(Lit), logger=[logger, *others], log_every_n_steps=1, enable_checkpointing=True)
    return logger.calls, bench.rows(), bench.files()


@feature("TensorBoardLogger, histograms of weights", needs=("tensorboardX",))
def tensorboard(bench: Bench) -> Any:
    """Numbers of its files, metrics, weights"""

    class Histograms(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for name, value in self.named_parameters():
                self.logger.experiment.add_histogram(name, value, self.trainer.global_step)
            return super().training_step(batch, batch_idx)

    logger = TensorBoardLogger(bench.root, name="", version="")
    ran = bench.fit(seeded(Histograms), logger=logger, log_every_n_steps=1)
    return ran.seen, len(bench.files("events*"))
