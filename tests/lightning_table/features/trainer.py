"""Arguments and entry points of the Trainer."""

from __future__ import annotations

import contextlib
import io
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.lightning_table.bench import Bench, Notes, Ran, variant
from tests.lightning_table.table import heading
from tests.trainer.toys import Lit, Samples, WithBatchNorm, seeded

feature = heading("Trainer")

SETTINGS: dict[str, dict[str, Any]] = {
    "limit_train_batches, limit_val_batches": {"limit_train_batches": 0.7, "limit_val_batches": 1},
    "max_steps": {"max_steps": 4, "max_epochs": -1},
    "min_epochs, max_time": {"max_time": timedelta(0), "min_epochs": 1},
    "val_check_interval in batches": {"val_check_interval": 2},
    "val_check_interval as a fraction": {"val_check_interval": 0.34},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "num_sanity_val_steps": {"num_sanity_val_steps": 2},
    "detect_anomaly": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "inference_mode=False": {"inference_mode": False},
    "benchmark=False, log_every_n_steps": {"benchmark": False, "log_every_n_steps": 1},
}


def _undo(module: Any, stage: str) -> None:
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


for _name, _settings in SETTINGS.items():
    feature(_name, fit=_settings)(variant(teardown=_undo))


@feature("detect_anomaly with a NaN in the backward")
def anomaly(bench: Bench) -> Any:
    """The error"""
    bad = variant(training_step=lambda m, batch, batch_idx: (m(batch[0]) * 0).sqrt().sum() * 0)
    try:
        return bench.raised(lambda: bench.fit(seeded(bad), detect_anomaly=True)).partition("'")[0]
    finally:
        torch.autograd.set_detect_anomaly(False)


feature("overfit_batches", fit={"overfit_batches": 1})(Lit)


@feature("fast_dev_run")
def fast_dev_run(bench: Bench) -> Any:
    """Losses, metrics, weights, steps; no files"""
    return bench.fit(fast_dev_run=2).seen, bench.files()


SILENT = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing", "num_sanity_val_steps")
feature("barebones", fit={"barebones": True} | dict.fromkeys(SILENT))(Lit)


@feature("validate, test and predict")
def evaluate(bench: Bench) -> Any:
    """Metrics they return, predictions, before a fit and after it"""
    module, of = seeded(Lit), bench.trainer()
    found: list[Any] = []

    def look() -> None:
        both = [bench.loader(), bench.loader(1)]
        found.append((of.validate(module, both[0], verbose=False), of.test(module, both, verbose=False)))
        found.append(of.predict(module, both[0]))

    module.test_step = lambda batch, batch_idx, dataloader_idx=0: module._evaluate(batch)
    look()
    of.fit(module, bench.loader())
    look()
    return found, Ran(of, module).seen


@feature("predict(return_predictions=False)")
def predict_only(bench: Bench) -> Any:
    """What it returns, what each step gave"""

    class Keeps(Notes):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.noted.append(super().predict_step(batch, batch_idx))
            return self.noted[-1]

    module = seeded(Keeps)
    return bench.trainer().predict(module, bench.loader(), return_predictions=False), module.noted


class KeepsOptimizer(Lit):
    """Its optimizer and momentum go on in the next fit."""

    kept: Any = None

    def configure_optimizers(self) -> Any:
        self.kept = self.kept or super().configure_optimizers()
        return self.kept


@feature("a second fit, by the same Trainer or by another")
def fit_twice(bench: Bench) -> Any:
    first = bench.fit(max_epochs=1)
    first.trainer.fit_loop.max_epochs = 2
    first.trainer.fit(first.module, bench.loader(), bench.loader())
    second = bench.fit(first.module, max_epochs=1).seen
    kept = bench.fit(seeded(KeepsOptimizer), max_epochs=1)
    return first.seen, second, bench.fit(kept.module, max_epochs=1).seen


@feature("trainer.should_stop")
class Stops(Lit):
    def on_train_batch_end(self, *_: Any) -> None:
        here = self.global_rank == 1 and self.trainer.global_step == 2
        self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(here, all=False)


@feature("use_distributed_sampler")
def sampler(bench: Bench) -> Any:
    """Which samples each rank gets, shuffled anew by epoch; losses, weights"""

    class Sees(Notes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.noted.append(batch[0])
            return super().training_step(batch, batch_idx)

    data = DataLoader(Samples(10), batch_size=2, shuffle=True)
    ran = bench.fit(seeded(Sees), data, val=DataLoader(Samples(6), batch_size=2), use_distributed_sampler=True)
    first = ran.module.noted[0]
    both = [torch.empty_like(first) for _ in range(dist.get_world_size())]
    dist.all_gather(both, first)
    assert not torch.equal(*both)
    return ran.seen


@feature("reload_dataloaders_every_n_epochs")
def reload(bench: Bench) -> Any:
    """Calls of train_dataloader, losses, weights"""

    class Reloads(Notes):
        def train_dataloader(self) -> Any:
            self.noted.append(self.trainer.current_epoch)
            return bench.loader(1 + len(self.noted) % 2)

    module = seeded(Reloads)
    of = bench.trainer(reload_dataloaders_every_n_epochs=1, max_epochs=3)
    of.fit(module)
    assert len(module.noted) == 3
    return Ran(of, module).seen


_ON_GPUS = variant(WithBatchNorm, __doc__="It needs GPUs")
feature("sync_batchnorm", ddp_raises="SyncBatchNorm", fit={"sync_batchnorm": True, "count": 8})(_ON_GPUS)
feature("BatchNorm without sync_batchnorm")(variant(WithBatchNorm))


@feature("estimated_stepping_batches, num_training_batches, world_size", fit={"accumulate_grad_batches": 2})
class Asks(Notes):
    """What the Trainer says of itself in configure_optimizers and in a step"""

    def configure_optimizers(self) -> Any:
        of = self.trainer
        self.noted.append((of.estimated_stepping_batches, of.num_training_batches, of.max_steps, of.world_size))
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        of = self.trainer
        self.noted.append((of.is_global_zero, of.global_rank, of.num_devices, of.num_nodes, of.is_last_batch))
        self.noted.append((str(self.device), str(self.dtype), of.precision, of.training, of.evaluating))
        return super().training_step(batch, batch_idx)


@feature("the table that validate prints")
def verbose(bench: Bench) -> Any:
    """What is printed, on which rank"""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bench.trainer().validate(seeded(Lit), bench.loader())
    return {"printed": out.getvalue()}


@feature("trainer.print, self.print, rank_zero_only")
def prints(bench: Bench) -> Any:
    """What is printed, on which rank"""

    class Prints(Notes):
        def on_train_epoch_end(self) -> None:
            self.print("module", self.current_epoch)
            self.trainer.print("trainer")
            self._alone()

        @pl.utilities.rank_zero_only
        def _alone(self) -> None:
            self.noted.append(self.global_rank)

    with contextlib.redirect_stdout(io.StringIO()) as out:
        ran = bench.fit(seeded(Prints))
    return out.getvalue(), ran.seen


@feature("trainer.init_module")
def init_module(bench: Bench) -> Any:
    of = bench.trainer()
    with of.init_module():
        module = seeded(Lit)
    of.fit(module, bench.loader(), bench.loader())
    return Ran(of, module).seen


@feature("KeyboardInterrupt")
def interrupt(bench: Bench) -> Any:
    """Whether the Trainer says that it was interrupted, hooks that are called"""

    class Interrupted(Notes):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 2:
                raise KeyboardInterrupt

        def on_exception(self, exception: BaseException) -> None:
            self.noted.append(type(exception).__name__)

        def teardown(self, stage: str) -> None:
            self.noted.append(stage)

    module, of = seeded(Interrupted), bench.trainer()
    try:
        of.fit(module, bench.loader())
    except (KeyboardInterrupt, SystemExit) as error:
        module.noted.append(type(error).__name__)
    return module.noted, of.interrupted, of.state.status.value
