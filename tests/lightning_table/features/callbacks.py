"""Lightning's callbacks."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests.lightning_table.bench import Bench, Records, checkpoint
from tests.lightning_table.table import feature
from tests.trainer.toys import Block, Lit, WithBatchNorm, seeded


@feature("EarlyStopping")
def early_stopping(bench: Bench) -> Any:
    """The epoch that it stops at, its best score and count, weights"""
    callback = EarlyStopping("val", patience=1, min_delta=10.0)
    ran = bench.fit(max_epochs=6, callbacks=[callback])
    assert 0 < callback.stopped_epoch < 5
    return ran.seen, callback.stopped_epoch, callback.best_score, callback.wait_count


@feature("EarlyStopping(check_finite)")
def early_stopping_finite(bench: Bench) -> Any:
    """The step that it stops at, once the loss of one rank is NaN"""

    class Fails(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            bad = self.trainer.current_epoch == 1 and self.global_rank == 0
            self.log("val", torch.tensor(float("nan") if bad else 1.0), sync_dist=True)

    ran = bench.fit(seeded(Fails), max_epochs=5, callbacks=[EarlyStopping("val", check_finite=True)])
    assert ran.trainer.current_epoch == 2
    return ran.seen


def _saved(bench: Bench, callback: ModelCheckpoint, **settings: Any) -> Any:
    ran = bench.fit(enable_checkpointing=True, callbacks=[callback], **settings)
    files = bench.files("**/*.ckpt")
    assert files
    state = {key: value for key, value in callback.state_dict().items() if key != "dirpath"}
    contents = {name: _content(checkpoint(bench.root / name)) for name in files}
    return ran.seen, files, bench.relative(state), contents


def _content(file: dict[str, Any]) -> Any:
    """What Lightning and its tools read of a checkpoint, and all its keys. (Ours has ``lightning_zero_rng`` too.)"""
    names = ("epoch", "global_step", "state_dict", "lr_schedulers", "optimizer_states", "loops", "hyper_parameters")
    found = {name: file[name] for name in names if name in file}
    return sorted(file.keys() - {"lightning_zero_rng"}), found | {
        "state_dict": dict(sorted(file["state_dict"].items()))
    }


@feature("ModelCheckpoint(monitor, save_top_k, save_last)")
def checkpoint_monitor(bench: Bench) -> Any:
    """Names and scores, the best, and what is in the files: weights, optimizer states, loops, all their keys"""
    return _saved(bench, ModelCheckpoint(bench.root, "{epoch}", monitor="val", save_top_k=2, save_last=True),
                  max_epochs=4)  # fmt: skip


@feature("ModelCheckpoint(every_n_train_steps)")
def checkpoint_steps(bench: Bench) -> Any:
    """Names and contents"""
    return _saved(bench, ModelCheckpoint(bench.root, "{step}", every_n_train_steps=2, save_top_k=-1))


@feature("ModelCheckpoint(every_n_epochs, save_on_train_epoch_end)")
def checkpoint_epochs(bench: Bench) -> Any:
    """Names and contents"""
    callback = ModelCheckpoint(bench.root, "{epoch}-{val:.3f}", every_n_epochs=2, save_on_train_epoch_end=True)
    return _saved(bench, callback, max_epochs=4)


@feature("ModelCheckpoint(train_time_interval)")
def checkpoint_time(bench: Bench) -> Any:
    """Names and contents"""
    callback = ModelCheckpoint(bench.root, "{step}", train_time_interval=timedelta(0), save_top_k=-1)
    return _saved(bench, callback, max_steps=3)


@feature("ModelCheckpoint(save_weights_only)")
def checkpoint_weights(bench: Bench) -> Any:
    """Names and contents: no states of optimizers"""
    return _saved(bench, ModelCheckpoint(bench.root, save_weights_only=True), max_epochs=1)


@feature('ModelCheckpoint(save_last="link")')
def checkpoint_link(bench: Bench) -> Any:
    """Names, contents, and where the link leads"""
    found = _saved(bench, ModelCheckpoint(bench.root, "{epoch}", save_last="link", save_top_k=-1))
    return found, (bench.root / "last.ckpt").is_symlink(), (bench.root / "last.ckpt").resolve().name


class Raises(Lit):
    """On all ranks, in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


@feature("ModelCheckpoint(save_on_exception)")
def checkpoint_on_exception(bench: Bench) -> Any:
    """The error, names of files and contents"""
    callback = ModelCheckpoint(bench.root, "{step}", save_on_exception=True)
    error = bench.raised(lambda: bench.fit(seeded(Raises), enable_checkpointing=True, callbacks=[callback]))
    files = bench.files("**/*.ckpt")
    return error, files, [_content(checkpoint(bench.root / name)) for name in files]


@feature("OnExceptionCheckpoint")
def on_exception_checkpoint(bench: Bench) -> Any:
    """The error, and what is in the file"""

    class Keep(OnExceptionCheckpoint):
        def teardown(self, *_: Any, **__: Any) -> None:
            """Lightning's removes the file."""

    settings: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [Keep(bench.root)]}
    error = bench.raised(lambda: bench.fit(seeded(Raises), **settings))
    dist.barrier()
    return error, _content(checkpoint(bench.root / "on_exception.ckpt"))


@feature("LearningRateMonitor")
def learning_rate_monitor(bench: Bench) -> Any:
    """Rates, momenta and weight decays that it has written"""
    logger = CSVLogger(bench.root, name="", version="")
    callback = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    bench.fit(seeded(lambda: Lit(scheduler="step")), logger=logger, callbacks=[callback], log_every_n_steps=1)
    return rows(bench)


def rows(bench: Bench) -> list[dict[str, str]]:
    """What a CSVLogger has written."""
    dist.barrier()
    with (bench.root / "metrics.csv").open() as file:
        found = list(csv.DictReader(file))
    assert found
    return [{k: round(float(v), 5) if v else v for k, v in row.items()} for row in found]  # type: ignore[misc]


@feature("DeviceStatsMonitor")
def device_stats(bench: Bench) -> Any:
    """Names of what it logs, steps"""
    logger = CSVLogger(bench.root, name="", version="")
    bench.fit(logger=logger, callbacks=[DeviceStatsMonitor(cpu_stats=True)], log_every_n_steps=1)
    found = rows(bench)
    assert any("cpu" in name for name in found[0])
    return list(found[0]), [row["step"] for row in found]


@feature("GradientAccumulationScheduler")
def accumulation_scheduler(bench: Bench) -> Any:
    """Losses, metrics, weights, steps"""
    return bench.fit(max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 3, 1: 1, 2: 2})]).seen


@feature("StochasticWeightAveraging")
def stochastic_weight_averaging(bench: Bench) -> Any:
    """Losses, metrics, weights, rates, with a scheduler, and with buffers"""
    found = []
    for module in (seeded(lambda: Lit(scheduler="epoch")), seeded(WithBatchNorm)):
        callback = StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1)
        ran = bench.fit(module, max_epochs=4, callbacks=[callback])
        found.append((ran.seen, ran.module.rates))
    return found


@feature("WeightAveraging")
def weight_averaging(bench: Bench) -> Any:
    """Losses, metrics, averaged weights, without buffers, by epoch, rarely, and by a function of one's own"""

    class EveryEpoch(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return epoch_idx is not None

    averages = [
        WeightAveraging(),
        WeightAveraging(use_buffers=False),
        EveryEpoch(),
        EMAWeightAveraging(decay=0.8, update_every_n_steps=2, update_starting_at_step=3),
        WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    ]
    return [bench.fit(seeded(WithBatchNorm), callbacks=[callback], val_check_interval=2).seen for callback in averages]


@feature("EMAWeightAveraging")
def ema(bench: Bench) -> Any:
    """Losses, metrics, averaged weights, the file's keys"""
    save = ModelCheckpoint(bench.root, "last")
    ran = bench.fit(enable_checkpointing=True, callbacks=[EMAWeightAveraging(decay=0.8), save])
    file = checkpoint(bench.root / bench.files("*.ckpt")[0])
    return ran.seen, _content(file), dict(sorted(file["averaging_state"].items()))


class Flat(Lit):
    """Without layer norms, whose weights have one dimension."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for block in self.blocks:
            block.norm = nn.Identity()


class Pruning(ModelPruning):
    """On the CPU Lightning's lottery ticket shares memory with the parameters, so that training changes it. On GPUs,
    and with shards, it does not."""

    @staticmethod
    def _copy_param(new: nn.Module, old: nn.Module, name: str) -> None:
        ModelPruning._copy_param(new, copy.deepcopy(old), name)


PRUNINGS: list[dict[str, Any]] = [
    {},
    {"use_lottery_ticket_hypothesis": False},
    {"use_lottery_ticket_hypothesis": False, "use_global_unstructured": False},
    {"prune_on_train_epoch_end": False},
    {"make_pruning_permanent": False},
]


@feature("ModelPruning, unstructured")
def pruning(bench: Bench) -> Any:
    """Losses, metrics, pruned weights, what is in the file: with lottery tickets, local, kept as masks"""
    found = []
    for settings in PRUNINGS:
        callback = Pruning("l1_unstructured", amount=0.3, **settings)
        ran = bench.fit(seeded(lambda: Flat(optimizer="adamw", lr=0.2)), callbacks=[callback])
        ran.trainer.save_checkpoint(bench.root / "a.ckpt")
        state = dict(sorted(checkpoint(bench.root / "a.ckpt")["state_dict"].items()))
        assert sum(int((value == 0).sum()) for value in state.values()) > 30
        found.append((ran.seen, state))
        dist.barrier()
    return found


@feature("ModelPruning, structured")
def pruning_structured(bench: Bench) -> Any:
    """Losses, metrics, pruned weights"""
    callback = ModelPruning(
        "ln_structured",
        amount=0.3,
        use_global_unstructured=False,
        pruning_dim=0,
        pruning_norm=1,
        parameter_names=["weight"],
        use_lottery_ticket_hypothesis=False,
    )
    return bench.fit(seeded(Flat), callbacks=[callback]).seen


class Backbone(Lit):
    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks
        self.backbone = nn.Sequential(nn.Linear(4, 8), Block(8), Block(8))

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=0.05, momentum=0.9)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[2], optimizer, lr=0.02)


# DDP does not average gradients of what was frozen when it started: one process is the one that is right.
@feature("BackboneFinetuning", beside="auto")
def backbone_finetuning(bench: Bench) -> Any:
    """Weights, groups of the optimizer"""
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, lambda_func=lambda _: 1.5)
    return _finetuned(bench, callback)


@feature("BaseFinetuning", beside="auto")
def base_finetuning(bench: Bench) -> Any:
    """Weights, groups of the optimizer"""
    return _finetuned(bench, Unfreeze())


def _finetuned(bench: Bench, callback: Any) -> Any:
    ran = bench.fit(seeded(Backbone), max_epochs=3, val=False, callbacks=[callback])
    groups = [(len(group["params"]), group["lr"]) for group in ran.trainer.optimizers[0].param_groups]
    assert len(groups) > 1
    return ran.weights, groups


@feature("LearningRateFinder")
def learning_rate_finder(bench: Bench) -> Any:
    """The rate it finds, losses and weights after it"""

    class Tuned(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.05

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    ran = bench.fit(seeded(Tuned), count=96, max_epochs=1, callbacks=[LearningRateFinder(num_training_steps=16)])
    assert ran.module.lr != 0.05
    return ran.module.lr, ran.weights, [path for path in bench.files() if "lr_find" in path]


@feature("BatchSizeFinder", ddp_raises="distributed")
def batch_size_finder(bench: Bench) -> Any:
    """Lightning finds a batch size on one rank only"""
    module = seeded(Lit)
    module.batch_size = 2
    return bench.fit(module, callbacks=[BatchSizeFinder()])


@feature("Timer")
def timer(bench: Bench) -> Any:
    """Steps that fit into no time, the names of the times it took"""
    callback = Timer(duration=timedelta(seconds=0), interval="step")
    long = Timer(duration=timedelta(hours=1))
    ran = bench.fit(callbacks=[callback]), bench.fit(callbacks=[long])
    assert long.time_elapsed("train") > 0 and long.time_remaining("train") > 0
    return [r.seen for r in ran], list(long.state_dict()["time_elapsed"])


@feature("TQDMProgressBar")
def tqdm_bar(bench: Bench) -> Any:
    """What the bars show, on which rank"""

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            shown.append(
                (self.train_progress_bar.n, self.train_progress_bar.total, sorted(self.get_metrics(*args[:2])))
            )

    class Shows(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("shown", loss, prog_bar=True)
            return loss

    shown: list[Any] = []
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        ran = bench.fit(seeded(Shows), enable_progress_bar=True, callbacks=[Bar()])
        ran.trainer.validate(ran.module, bench.loader(), verbose=False)
    assert shown
    return shown, ran.seen


@feature("RichProgressBar")
def rich_bar(bench: Bench) -> Any:
    """What is left of it on the screen's first rank, metrics"""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()) as out:
        ran = bench.fit(enable_progress_bar=True, callbacks=[RichProgressBar()])
    return ran.seen, bool(out.getvalue().strip())


def _summarized(bench: Bench, kind: type[ModelSummary]) -> Any:
    class Looks(kind):  # type: ignore[valid-type, misc]
        def _summary(self, *args: Any) -> Any:
            seen.append(super()._summary(*args))
            return seen[-1]

    class WithExample(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.ones(3, 4)

    seen: list[Any] = []
    module = seeded(WithExample)
    module.head.requires_grad_(False)
    with contextlib.redirect_stdout(io.StringIO()):
        ran = bench.fit(module, enable_model_summary=True, callbacks=[Looks(max_depth=2)], ddp={})
    data = seen[0]._get_summary_data()
    counts = (seen[0].total_parameters, seen[0].trainable_parameters, seen[0].model_size)
    return counts, [(name, list(column)) for name, column in data], ran.weights


@feature("ModelSummary(max_depth), of a module with example_input_array")
def model_summary(bench: Bench) -> Any:
    """All its columns: names, numbers of parameters, sizes in and out, FLOPs; weights"""
    return _summarized(bench, ModelSummary)


@feature("RichModelSummary")
def rich_model_summary(bench: Bench) -> Any:
    """All its columns; weights"""
    return _summarized(bench, RichModelSummary)


class Writer(BasePredictionWriter):
    def __init__(self, bench: Bench) -> None:
        super().__init__("batch_and_epoch")
        self.bench = bench

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, idx: int, *_: Any
    ) -> None:
        torch.save((indices, prediction), self.bench.root / f"batch{trainer.global_rank}-{idx}.pt")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        torch.save((indices, predictions), self.bench.root / f"epoch{trainer.global_rank}.pt")


@feature("BasePredictionWriter")
def prediction_writer(bench: Bench) -> Any:
    """Predictions and indices of each rank, by batch and by epoch"""
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(40.0).view(10, 4)), batch_size=2)
    bench.trainer(callbacks=[Writer(bench)], use_distributed_sampler=True).predict(seeded(Lit), data)
    files = bench.files("*.pt")
    assert len(files) > 4
    return {name: torch.load(bench.root / name, weights_only=False) for name in files}


@feature("LambdaCallback")
def lambda_callback(bench: Bench) -> Any:
    """Calls, with the step of each"""
    calls: list[Any] = []
    names = ("on_train_start", "on_train_batch_end", "on_before_optimizer_step", "on_validation_end", "on_fit_end")
    hooks = {name: lambda t, *_, name=name, **__: calls.append((name, t.global_step)) for name in names}
    ran = bench.fit(callbacks=[LambdaCallback(**hooks)])
    assert {name for name, _ in calls} == set(names)
    return calls, ran.seen


@feature("ThroughputMonitor")
def throughput_monitor(bench: Bench) -> Any:
    """Names of what it logs; numbers of batches and samples"""

    class Flops(Lit):
        flops_per_batch = 100

    logger = CSVLogger(bench.root, name="", version="")
    callback = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
    bench.fit(seeded(Flops), logger=logger, callbacks=[callback], log_every_n_steps=1)
    found = rows(bench)
    counts = [{k: v for k, v in row.items() if k.endswith(("batches", "samples"))} for row in found]
    return sorted(found[0]), counts


@feature("SpikeDetection")
def spike_detection(bench: Bench) -> Any:
    """The error where a loss rises, the file of batches to skip"""

    class Rises(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1 if self.trainer.global_step < 4 else 1e6)

    callback = SpikeDetection(warmup=2, finite_only=True, rtol=1.0, atol=0.1)
    error = bench.raised(lambda: bench.fit(seeded(Rises), callbacks=[callback]))
    dist.barrier()
    return error, bench.relative(bench.files("*.json")), bench.root.joinpath("skip_batches.json").read_text()


@feature("Callback.state_dict and load_state_dict")
def callback_state(bench: Bench) -> Any:
    """What a callback of one's own finds again"""

    class Counts(Records):
        def state_dict(self) -> dict[str, Any]:
            return {"found": len(self.found)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict["found"]

    def counts() -> Counts:
        return Counts(lambda t, _: t.global_step, "on_train_batch_end")

    first = bench.fit(callbacks=[counts()], max_epochs=1)
    first.trainer.save_checkpoint(bench.root / "a.ckpt")
    callback = counts()
    ran = bench.fit(callbacks=[callback], ckpt_path=bench.root / "a.ckpt")
    return callback.loaded, callback.found, ran.seen
