"""Arguments and entry points of the Trainer."""

from __future__ import annotations

import contextlib
import io
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.lightning_table.bench import Bench, Ran
from tests.lightning_table.table import feature
from tests.trainer.toys import Lit, Samples, seeded

SETTINGS: dict[str, dict[str, Any]] = {
    "limit_train_batches, limit_val_batches": {"limit_train_batches": 0.7, "limit_val_batches": 1},
    "max_steps": {"max_steps": 4, "max_epochs": -1},
    "min_epochs, max_time": {"max_time": timedelta(0), "min_epochs": 1},
    "val_check_interval, in batches": {"val_check_interval": 2},
    "val_check_interval, a fraction": {"val_check_interval": 0.34},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "num_sanity_val_steps": {"num_sanity_val_steps": 2},
    "detect_anomaly": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "inference_mode=False": {"inference_mode": False},
    "benchmark=False, log_every_n_steps": {"benchmark": False, "log_every_n_steps": 1},
}
for _name, _settings in SETTINGS.items():

    def _with(bench: Bench, settings: Any = _settings) -> Any:
        try:
            ran = bench.fit(**settings)
        finally:
            torch.use_deterministic_algorithms(False)
            torch.autograd.set_detect_anomaly(False)
        return ran.seen, ran.module.evaluated

    _with.__doc__ = "Losses, metrics, weights, steps, losses of validation"
    feature(_name)(_with)


@feature("detect_anomaly: a NaN in the backward")
def anomaly(bench: Bench) -> Any:
    """The error"""

    class Bad(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self(batch[0]) * 0).sqrt().sum() * 0

    try:
        return bench.raised(lambda: bench.fit(seeded(Bad), detect_anomaly=True)).partition("'")[0]
    finally:
        torch.autograd.set_detect_anomaly(False)


@feature("overfit_batches")
def overfit(bench: Bench) -> Any:
    """Losses, metrics, weights, losses of validation"""
    ran = bench.fit(overfit_batches=1)
    return ran.seen, ran.module.evaluated


@feature("fast_dev_run")
def fast_dev_run(bench: Bench) -> Any:
    """Losses, metrics, weights, steps; no files"""
    return bench.fit(fast_dev_run=2).seen, bench.files()


@feature("barebones")
def barebones(bench: Bench) -> Any:
    """Losses, weights, steps"""
    silent = {"logger": None, "enable_progress_bar": None, "enable_model_summary": None}
    silent |= {"enable_checkpointing": None, "num_sanity_val_steps": None}
    return bench.fit(barebones=True, **silent).seen


@feature("validate, test and predict")
def evaluate(bench: Bench) -> Any:
    """Metrics they return, predictions, before a fit and after it"""
    module, of = seeded(Lit), bench.trainer()
    found: list[Any] = []

    def look() -> None:
        found.append(of.validate(module, bench.loader(), verbose=False))
        found.append(of.test(module, [bench.loader(), bench.loader(1)], verbose=False))
        found.append(of.predict(module, bench.loader()))

    module.test_step = lambda batch, batch_idx, dataloader_idx=0: module._evaluate(batch)
    look()
    of.fit(module, bench.loader())
    look()
    return found, Ran(of, module).seen


@feature("predict without keeping: return_predictions=False")
def predict_only(bench: Bench) -> Any:
    """What it returns, what each step gave"""
    seen: list[Any] = []

    class Keeps(Lit):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(super().predict_step(batch, batch_idx))
            return seen[-1]

    return bench.trainer().predict(seeded(Keeps), bench.loader(), return_predictions=False), seen


@feature("fit twice, with the same Trainer and with another")
def fit_twice(bench: Bench) -> Any:
    """Losses, metrics, weights"""
    first = bench.fit(max_epochs=1)
    first.trainer.fit_loop.max_epochs = 2
    first.trainer.fit(first.module, bench.loader(), bench.loader())
    return first.seen, bench.fit(first.module, max_epochs=1).seen


@feature("trainer.should_stop")
def should_stop(bench: Bench) -> Any:
    """Losses, weights, steps, where one rank asks for it and all agree"""

    class Stops(Lit):
        def on_train_batch_end(self, *_: Any) -> None:
            here = self.global_rank == 1 and self.trainer.global_step == 2
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(here, all=False)

    return bench.fit(seeded(Stops)).seen


@feature("use_distributed_sampler")
def sampler(bench: Bench) -> Any:
    """Which samples each rank gets, shuffled anew by epoch; losses, weights"""

    class Sees(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    seen: list[Any] = []
    data = DataLoader(Samples(10), batch_size=2, shuffle=True)
    ran = bench.fit(seeded(Sees), data, val=DataLoader(Samples(6), batch_size=2), use_distributed_sampler=True)
    both = [torch.empty_like(seen[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(both, seen[0])
    assert not torch.equal(*both)
    return seen, ran.seen


@feature("reload_dataloaders_every_n_epochs")
def reload(bench: Bench) -> Any:
    """Calls of train_dataloader, losses, weights"""

    class Reloads(Lit):
        def train_dataloader(self) -> Any:
            calls.append(self.trainer.current_epoch)
            return bench.loader(1 + len(calls) % 2)

    calls: list[int] = []
    module = seeded(Reloads)
    of = bench.trainer(reload_dataloaders_every_n_epochs=1, max_epochs=3)
    of.fit(module)
    assert len(calls) == 3
    return calls, Ran(of, module).seen


class Norm(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))


@feature("sync_batchnorm", ddp_raises="SyncBatchNorm")
def sync_batchnorm(bench: Bench) -> Any:
    """On GPUs only"""

    return bench.fit(seeded(Norm), sync_batchnorm=True, count=8).seen


@feature("BatchNorm without sync_batchnorm")
def batchnorm(bench: Bench) -> Any:
    """Losses, metrics, weights, statistics of rank 0"""

    return bench.fit(seeded(Norm)).seen


@feature("estimated_stepping_batches, num_training_batches, world_size")
def properties(bench: Bench) -> Any:
    """What the Trainer says of itself in configure_optimizers and in a step"""
    seen: list[Any] = []

    class Asks(Lit):
        def configure_optimizers(self) -> Any:
            of = self.trainer
            seen.append((of.estimated_stepping_batches, of.num_training_batches, of.max_steps, of.world_size))
            return super().configure_optimizers()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            of = self.trainer
            seen.append((of.is_global_zero, of.global_rank, of.num_devices, of.num_nodes, of.is_last_batch))
            seen.append((str(self.device), str(self.dtype), of.precision, of.training, of.evaluating))
            return super().training_step(batch, batch_idx)

    bench.fit(seeded(Asks), accumulate_grad_batches=2)
    return seen


@feature("verbose: the table of validate and test")
def verbose(bench: Bench) -> Any:
    """What is printed, on which rank"""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bench.trainer().validate(seeded(Lit), bench.loader())
    return {"printed": out.getvalue()}


@feature("trainer.print, self.print, rank_zero_only")
def prints(bench: Bench) -> Any:
    """What is printed, on which rank"""

    class Prints(Lit):
        def on_train_epoch_end(self) -> None:
            self.print("module", self.current_epoch)
            self.trainer.print("trainer")
            self._alone()

        @pl.utilities.rank_zero_only
        def _alone(self) -> None:
            calls.append(self.global_rank)

    calls: list[int] = []
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bench.fit(seeded(Prints))
    return {"printed": out.getvalue(), "calls": calls}


@feature("trainer.init_module")
def init_module(bench: Bench) -> Any:
    """Losses, metrics, weights"""
    of = bench.trainer()
    with of.init_module():
        module = seeded(Lit)
    of.fit(module, bench.loader(), bench.loader())
    return Ran(of, module).seen


@feature("KeyboardInterrupt")
def interrupt(bench: Bench) -> Any:
    """Whether the Trainer says that it was interrupted, hooks that are called"""
    calls: list[Any] = []

    class Interrupted(Lit):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 2:
                raise KeyboardInterrupt

        def on_exception(self, exception: BaseException) -> None:
            calls.append(type(exception).__name__)

        def teardown(self, stage: str) -> None:
            calls.append(stage)

    of = bench.trainer()
    try:
        of.fit(seeded(Interrupted), bench.loader())
    except (KeyboardInterrupt, SystemExit) as error:
        calls.append(type(error).__name__)
    return calls, of.interrupted, of.state.status.value
