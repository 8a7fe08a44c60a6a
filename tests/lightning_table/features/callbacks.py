"""Lightning's callbacks."""

from __future__ import annotations

import contextlib
import copy
import io
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import callbacks as cb
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests.lightning_table.bench import Bench, variant
from tests.lightning_table.table import heading
from tests.trainer.toys import Block, Fails, Lit, WithBatchNorm, seeded

feature = heading("Callbacks")


@feature("EarlyStopping")
def early_stopping(bench: Bench) -> Any:
    """The epoch that it stops at, its best score and count, weights"""
    callback = cb.EarlyStopping("val", patience=1, min_delta=10.0)
    ran = bench.fit(max_epochs=6, callbacks=[callback])
    assert 0 < callback.stopped_epoch < 5
    return ran.seen, callback.stopped_epoch, callback.best_score, callback.wait_count


@feature("EarlyStopping(check_finite)")
def early_stopping_finite(bench: Bench) -> Any:
    """The step that it stops at, once the loss of one rank is NaN"""

    class Diverges(Lit):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            bad = self.trainer.current_epoch == 1 and self.global_rank == 0
            self.log("val", torch.tensor(float("nan") if bad else 1.0), sync_dist=True)

    ran = bench.fit(seeded(Diverges), max_epochs=5, callbacks=[cb.EarlyStopping("val", check_finite=True)])
    assert ran.trainer.current_epoch == 2
    return ran.seen


# Settings of ModelCheckpoint, and of the fit.
SAVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "monitor, save_top_k, save_last": (
        {"filename": "{epoch}", "monitor": "val", "save_top_k": 2, "save_last": True},
        {"max_epochs": 4},
    ),
    "every_n_train_steps": ({"filename": "{step}", "save_top_k": -1, "every_n_train_steps": 2}, {}),
    "every_n_epochs, save_on_train_epoch_end": (
        {"filename": "{epoch}-{val:.3f}", "every_n_epochs": 2, "save_on_train_epoch_end": True},
        {"max_epochs": 4},
    ),
    "train_time_interval": (
        {"filename": "{step}", "save_top_k": -1, "train_time_interval": timedelta(0)},
        {"max_steps": 3},
    ),
    "save_weights_only": ({"save_weights_only": True}, {"max_epochs": 1}),
    'save_last="link"': ({"filename": "{epoch}", "save_top_k": -1, "save_last": "link"}, {}),
}


def _saving(settings: dict[str, Any], fit: dict[str, Any]) -> Any:
    def saved(bench: Bench) -> Any:
        """Losses, weights; names, scores and contents of files, with all their keys, where a link leads"""
        callback = ModelCheckpoint(bench.root, **settings)
        ran = bench.fit(enable_checkpointing=True, callbacks=[callback], **fit)
        state = {key: value for key, value in callback.state_dict().items() if key != "dirpath"}
        last = bench.root / "last.ckpt"
        return ran.seen, bench.relative(state), bench.contents(), last.is_symlink(), last.resolve().name

    return saved


for _name, _how in SAVES.items():
    feature(f"ModelCheckpoint({_name})")(_saving(*_how))


def _interrupted(make: Any) -> Any:
    def saved(bench: Bench) -> Any:
        """The error, names of files and contents"""
        settings = {"enable_checkpointing": True, "callbacks": [make(bench.root)]}
        return bench.raised(lambda: bench.fit(seeded(lambda: Fails(2)), **settings)), bench.contents()

    return saved


_KEEPS = variant(cb.OnExceptionCheckpoint, teardown=lambda *_, **__: None)  # Lightning's removes the file
_SAVES = partial(ModelCheckpoint, filename="{step}", save_on_exception=True)
feature("ModelCheckpoint(save_on_exception)")(_interrupted(_SAVES))
feature("OnExceptionCheckpoint")(_interrupted(_KEEPS))


@feature("LearningRateMonitor")
def learning_rate_monitor(bench: Bench) -> Any:
    """Rates, momenta and weight decays that it has written"""
    callback = cb.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    return bench.logged(seeded(lambda: Lit(scheduler="step")), callbacks=[callback])[1]


@feature("DeviceStatsMonitor")
def device_stats(bench: Bench) -> Any:
    """Names of what it logs, steps"""
    _, found = bench.logged(callbacks=[cb.DeviceStatsMonitor(cpu_stats=True)])
    assert any("cpu" in name for name in found[0])
    return list(found[0]), [row["step"] for row in found]


@feature("GradientAccumulationScheduler")
def accumulation_scheduler(bench: Bench) -> Any:
    return bench.fit(max_epochs=3, callbacks=[cb.GradientAccumulationScheduler({0: 3, 1: 1, 2: 2})]).seen


@feature("StochasticWeightAveraging")
def stochastic_weight_averaging(bench: Bench) -> Any:
    def ran(module: Any) -> Any:
        callback = cb.StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1)
        return bench.fit(module, max_epochs=4, callbacks=[callback]).seen

    return [ran(seeded(lambda: Lit(scheduler="epoch"))), ran(seeded(WithBatchNorm))]


@feature("WeightAveraging")
def weight_averaging(bench: Bench) -> Any:
    """Losses, metrics, averaged weights, without buffers, by epoch, rarely, and by a function of one's own"""
    by_epoch = variant(cb.WeightAveraging, should_update=lambda _, step_idx=None, epoch_idx=None: epoch_idx is not None)
    averages = [
        cb.WeightAveraging(),
        cb.WeightAveraging(use_buffers=False),
        by_epoch(),
        cb.EMAWeightAveraging(decay=0.8, update_every_n_steps=2, update_starting_at_step=3),
        cb.WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    ]
    return [bench.fit(seeded(WithBatchNorm), callbacks=[callback], val_check_interval=2).seen for callback in averages]


@feature("EMAWeightAveraging")
def ema(bench: Bench) -> Any:
    """Losses, metrics, averaged weights, what is in the file"""
    save = ModelCheckpoint(bench.root, "last")
    ran = bench.fit(enable_checkpointing=True, callbacks=[cb.EMAWeightAveraging(decay=0.8), save])
    return ran.seen, bench.contents()


def flat(**settings: Any) -> Lit:
    """Without layer norms, whose weights have one dimension."""
    module = Lit(**settings)
    for block in module.blocks:
        block.norm = nn.Identity()
    return module


class Pruning(cb.ModelPruning):
    """On the CPU Lightning's lottery ticket shares memory with the parameters, so that training changes it. On GPUs,
    and with shards, it does not."""

    @staticmethod
    def _copy_param(new: nn.Module, old: nn.Module, name: str) -> None:
        cb.ModelPruning._copy_param(new, copy.deepcopy(old), name)


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
        ran = bench.fit(seeded(lambda: flat(optimizer="adamw", lr=0.2)), callbacks=[callback])
        file = torch.load(ran.save(), weights_only=False)
        assert sum(int((value == 0).sum()) for value in file["state_dict"].values()) > 30
        found.append((ran.seen, dict(sorted(file["state_dict"].items()))))
        dist.barrier()
    return found


@feature("ModelPruning, structured")
def pruning_structured(bench: Bench) -> Any:
    by_norm = {"use_global_unstructured": False, "pruning_dim": 0, "pruning_norm": 1, "parameter_names": ["weight"]}
    callback = cb.ModelPruning("ln_structured", amount=0.3, use_lottery_ticket_hypothesis=False, **by_norm)
    return bench.fit(seeded(flat), callbacks=[callback]).seen


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


class Unfreeze(cb.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[2], optimizer, lr=0.02)


# DDP does not average gradients of what was frozen when it started: one process is the one that is right.
def _finetuned(make: Any, **settings: Any) -> Any:
    def body(bench: Bench) -> Any:
        """Weights, groups of the optimizer"""
        ran = bench.fit(seeded(Backbone), max_epochs=3, val=False, callbacks=[make(**settings)])
        groups = [(len(group["params"]), group["lr"]) for group in ran.trainer.optimizers[0].param_groups]
        assert len(groups) > 1
        return ran.weights, groups

    return body


_RATES = {"unfreeze_backbone_at_epoch": 1, "backbone_initial_lr": 0.01, "lambda_func": lambda _: 1.5}
feature("BackboneFinetuning", beside="auto")(_finetuned(cb.BackboneFinetuning, **_RATES))
feature("BaseFinetuning", beside="auto")(_finetuned(Unfreeze))


@feature("LearningRateFinder")
def learning_rate_finder(bench: Bench) -> Any:
    """The rate it finds, losses and weights after it"""
    callbacks = [cb.LearningRateFinder(num_training_steps=16)]
    ran = bench.fit(count=96, max_epochs=1, callbacks=callbacks)
    assert ran.module.hparams.lr != 0.05
    return ran.module.hparams.lr, ran.weights, [path for path in bench.files() if "lr_find" in path]


@feature("BatchSizeFinder", ddp_raises="distributed")
def batch_size_finder(bench: Bench) -> Any:
    """Lightning finds a batch size on one rank only"""
    return bench.fit(callbacks=[cb.BatchSizeFinder()])


@feature("Timer")
def timer(bench: Bench) -> Any:
    """Steps that fit into no time, the names of the times it took"""
    short = cb.Timer(duration=timedelta(seconds=0), interval="step")
    long = cb.Timer(duration=timedelta(hours=1))
    found = [bench.fit(callbacks=[callback]).seen for callback in (short, long)]
    assert long.time_elapsed("train") > 0 and long.time_remaining("train") > 0
    return found, list(long.state_dict()["time_elapsed"])


@feature("TQDMProgressBar")
def tqdm_bar(bench: Bench) -> Any:
    """What the bars show, on which rank"""

    class Bar(cb.TQDMProgressBar):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            bar = self.train_progress_bar
            shown.append((bar.n, bar.total, sorted(self.get_metrics(*args[:2]))))

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
        ran = bench.fit(enable_progress_bar=True, callbacks=[cb.RichProgressBar()])
    return ran.seen, bool(out.getvalue().strip())


def _summarized(kind: type[cb.ModelSummary]) -> Any:
    def body(bench: Bench) -> Any:
        """All its columns: names, numbers of parameters, sizes in and out, FLOPs; weights"""

        def look(callback: Any, *args: Any) -> Any:
            seen.append(kind._summary(callback, *args))
            return seen[-1]

        seen: list[Any] = []
        module = seeded(Lit)
        module.example_input_array = torch.ones(3, 4)
        module.head.requires_grad_(False)
        callback = variant(kind, _summary=look)(max_depth=2)
        with contextlib.redirect_stdout(io.StringIO()):
            ran = bench.fit(module, enable_model_summary=True, callbacks=[callback])
        counts = (seen[0].total_parameters, seen[0].trainable_parameters, seen[0].model_size)
        return counts, [(name, list(column)) for name, column in seen[0]._get_summary_data()], ran.weights

    return body


feature("ModelSummary(max_depth), of a module with example_input_array")(_summarized(cb.ModelSummary))
feature("RichModelSummary")(_summarized(cb.RichModelSummary))


@feature("BasePredictionWriter")
def prediction_writer(bench: Bench) -> Any:
    """Predictions and indices of each rank, by batch and by epoch"""

    class Writes(cb.BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, *found: Any) -> None:
            prediction, indices, _, number, _ = found
            torch.save((indices, prediction), bench.root / f"batch{trainer.global_rank}-{number}.pt")

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            torch.save((indices, predictions), bench.root / f"epoch{trainer.global_rank}.pt")

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(40.0).view(10, 4)), batch_size=2)
    bench.trainer(callbacks=[Writes("batch_and_epoch")], use_distributed_sampler=True).predict(seeded(Lit), data)
    files = bench.files("*.pt")
    assert len(files) > 4
    return {name: torch.load(bench.root / name, weights_only=False) for name in files}


@feature("LambdaCallback")
def lambda_callback(bench: Bench) -> Any:
    """Calls, with the step of each"""
    calls: list[Any] = []
    names = ("on_train_start", "on_train_batch_end", "on_before_optimizer_step", "on_validation_end", "on_fit_end")
    hooks = {name: lambda t, *_, name=name, **__: calls.append((name, t.global_step)) for name in names}
    ran = bench.fit(callbacks=[cb.LambdaCallback(**hooks)])
    assert {name for name, _ in calls} == set(names)
    return calls, ran.seen


@feature("ThroughputMonitor")
def throughput_monitor(bench: Bench) -> Any:
    """Names of what it logs; numbers of batches and samples"""
    module = seeded(Lit)
    module.flops_per_batch = 100
    callback = cb.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
    _, found = bench.logged(module, callbacks=[callback])
    counts = [{k: v for k, v in row.items() if k.endswith(("batches", "samples"))} for row in found]
    return sorted(found[0]), counts


@feature("SpikeDetection")
def spike_detection(bench: Bench) -> Any:
    """The error where a loss rises, the file of batches to skip"""

    class Rises(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1 if self.trainer.global_step < 4 else 1e6)

    callback = cb.SpikeDetection(warmup=2, finite_only=True, rtol=1.0, atol=0.1)
    error = bench.raised(lambda: bench.fit(seeded(Rises), callbacks=[callback]))
    return error, bench.files("*.json"), bench.root.joinpath("skip_batches.json").read_text()


@feature("Callback.state_dict and load_state_dict")
def callback_state(bench: Bench) -> Any:
    """What a callback of one's own finds again"""

    class Counts(cb.Callback):
        count = loaded = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict["count"]

    path = bench.fit(callbacks=[Counts()], max_epochs=1).save()
    callback = Counts()
    ran = bench.fit(callbacks=[callback], ckpt_path=path)
    assert callback.loaded
    return callback.loaded, callback.count, ran.seen
