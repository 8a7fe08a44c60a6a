"""Lightning's callbacks, tuner, metrics and summaries find what they find under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection

from tests.harness import on_ranks
from tests.trainer.toys import (
    STAGES,
    Block,
    Lit,
    Run,
    Samples,
    assert_same,
    assert_weights,
    fit,
    loader,
    record,
    seeded,
    trainer,
    whole_loader,
)

pytestmark = pytest.mark.full

# -- fine-tuning ------------------------------------------------------------------------------------------------------


class Backbone(Lit):
    """A pretrained part that starts frozen."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks
        self.backbone = nn.Sequential(nn.Linear(4, 8), Block(8), Block(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x))
        return out

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=0.05, momentum=0.9)


class UnfreezeBlock(BaseFinetuning):
    """Everything but the head frozen; one block thaws at epoch 1, the rest at epoch 2."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[2], optimizer, lr=0.02)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


def finetuning(name: str) -> Callback:
    if name == "backbone":
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, lambda_func=lambda _: 1.5)
    return UnfreezeBlock()


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("name", ["backbone", "in steps"])
def test_finetuning(name: str, tmp_path: Path) -> None:
    """The oracle is one process on all samples: DDP does not reduce what was frozen when it started."""
    alone = trainer("auto", tmp_path, max_epochs=4, callbacks=[finetuning(name)])
    module = seeded(Backbone)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    alone.fit(module, whole_loader(4))
    expected = record(alone, module)
    assert all(not torch.equal(before[k], expected.weights[k]) for k in before)
    for stage in STAGES:
        settings: dict[str, Any] = {"max_epochs": 4, "limit_val_batches": 0, "gradient_clip_val": None}
        found = fit(stage, tmp_path, seeded(Backbone), callbacks=[finetuning(name)], **settings)
        assert_weights(found.weights, expected.weights, what=stage)
        assert [len(g["params"]) for g in found.trainer.optimizers[0].param_groups] == [
            len(g["params"]) for g in alone.optimizers[0].param_groups
        ]


@on_ranks(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_finetuning_resumes_after_the_thaw(precision: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"limit_val_batches": 0, "precision": precision}
    for stage in ("zero1", "zero3"):
        whole = fit(stage, tmp_path, seeded(Backbone), max_epochs=4, callbacks=[finetuning("in steps")], **settings)
        first = fit(stage, tmp_path, seeded(Backbone), max_epochs=2, callbacks=[finetuning("in steps")], **settings)
        path = tmp_path / f"{stage}.ckpt"
        first.trainer.save_checkpoint(path)
        rest = fit(
            stage,
            tmp_path,
            seeded(Backbone, seed=5),
            max_epochs=4,
            callbacks=[finetuning("in steps")],
            ckpt_path=path,
            **settings,
        )
        assert_weights(rest.weights, whole.weights, tolerance=0, what=stage)


@on_ranks(2)
def test_freezing_and_thawing_between_fits(tmp_path: Path) -> None:
    def body(strategy: str, data: Any) -> Run:
        module = seeded(Backbone)
        for frozen in (True, False, True):
            module.backbone.requires_grad_(not frozen)
            of = trainer(strategy, tmp_path, max_epochs=1)
            of.fit(module, data)
        return record(of, module)

    expected = body("auto", whole_loader(4))
    for stage in STAGES:
        assert_weights(body(stage, loader()).weights, expected.weights, what=stage)


# -- tuner ------------------------------------------------------------------------------------------------------------


class Tuned(Lit):
    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.lr = 0.05
        self.batch_size = 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(96), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(8), batch_size=self.batch_size)


@pytest.mark.sample
@on_ranks(2)
def test_learning_rate_finder(tmp_path: Path) -> None:
    def by_tuner(strategy: str) -> tuple[Any, Run]:
        module = seeded(Tuned)
        of = trainer(strategy, tmp_path)
        found = Tuner(of).lr_find(module, loader(), num_training=12, update_attr=True)
        assert found is not None
        of.fit(module, loader())
        return found.results, record(of, module)

    results, expected = by_tuner("ddp")
    for stage in ("zero1", "zero3"):
        found_results, found = by_tuner(stage)
        assert found_results["lr"] == results["lr"]
        torch.testing.assert_close(found_results["loss"], results["loss"], rtol=1e-4, atol=1e-4)
        assert_same(found, expected, what=stage)


@on_ranks(2)
def test_learning_rate_finder_as_a_callback(tmp_path: Path) -> None:
    """Training starts from the weights and the optimizer state as they were."""

    def body(strategy: str) -> tuple[float, Run]:
        finder = LearningRateFinder(num_training_steps=16)
        found = fit(strategy, tmp_path, seeded(Tuned), count=96, max_epochs=1, callbacks=[finder])
        return found.module.lr, found

    lr, expected = body("ddp")
    for stage in ("zero1", "zero3"):
        found_lr, found = body(stage)
        assert found_lr == lr != 0.05
        assert_same(found, expected, what=stage)


@on_ranks(2)
def test_batch_size_finder_refuses_several_ranks_as_under_ddp(tmp_path: Path) -> None:
    for strategy in ("ddp", "zero3"):
        of = trainer(strategy, tmp_path, callbacks=[BatchSizeFinder()])
        with pytest.raises(MisconfigurationException, match="distributed"):
            of.fit(seeded(Tuned))


@on_ranks(1)
def test_batch_size_finder_on_one_rank(tmp_path: Path) -> None:
    results = []
    for strategy in ("auto", "zero3"):
        module = seeded(Tuned)
        finder = BatchSizeFinder(max_trials=3, steps_per_trial=2)
        of = trainer(strategy, tmp_path, max_steps=4, callbacks=[finder])
        of.fit(module)
        results.append((module.batch_size, record(of, module)))
    assert results[0][0] == results[1][0] == 8
    assert_weights(results[1][1].weights, results[0][1].weights)


# -- what is looked at ------------------------------------------------------------------------------------------------


@pytest.mark.sample
@on_ranks(2)
def test_model_summary_counts_whole_parameters(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Summary(ModelSummary):
        def _summary(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
            seen.append(super()._summary(trainer, pl_module))
            return seen[-1]

    module = seeded(Lit)
    module.head.requires_grad_(False)
    expected = summarize(module, max_depth=2)
    for stage in STAGES:
        fit(stage, tmp_path, module, enable_model_summary=True, callbacks=[Summary(max_depth=2)], max_steps=1)
        found = seen.pop()
        assert found.total_parameters == expected.total_parameters
        assert found.trainable_parameters == expected.trainable_parameters
        assert found.param_nums == expected.param_nums
        assert found.model_size == expected.model_size


@on_ranks(2)
def test_shapes_are_whole_where_optimizers_are_configured(tmp_path: Path) -> None:
    class ByShape(Lit):
        def configure_optimizers(self) -> Any:
            decay = [p for p in self.parameters() if p.ndim >= 2]
            rest = [p for name, p in self.named_parameters() if p.ndim < 2]
            assert sum(p.numel() for p in decay + rest) == sum(p.numel() for p in Lit().parameters())
            groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=0.01)

    expected = fit("ddp", tmp_path, seeded(ByShape))
    for stage in STAGES:
        assert_same(fit(stage, tmp_path, seeded(ByShape)), expected, what=stage)


@on_ranks(2)
def test_learning_rate_monitor(tmp_path: Path) -> None:
    rows: list[str] = []
    for strategy in ("ddp", "zero3"):
        logger = CSVLogger(tmp_path / strategy, name="", version="")
        callbacks = [LearningRateMonitor(log_momentum=True, log_weight_decay=True)]
        module = seeded(lambda: Lit(scheduler="step"))
        fit(strategy, tmp_path, module, logger=logger, callbacks=callbacks, log_every_n_steps=1)
        dist.barrier()
        rows.append([line.split(",")[:4] for line in (tmp_path / strategy / "metrics.csv").read_text().splitlines()])  # type: ignore[arg-type]
    assert rows[0] == rows[1]
    assert len({row[1] for row in rows[0]}) > 2


class Metrics(Lit):
    """torchmetrics as submodules and Lightning's own logging, reduced in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.train_mse = MeanSquaredError()
        self.val_metrics = MetricCollection({"mse": MeanSquaredError(), "mean": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.train_mse(self(batch[0]), batch[1])
        self.log("train_mse", self.train_mse, on_step=False, on_epoch=True)
        self.log("ranks", float(dist.get_rank()), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", loss, sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.val_metrics["mse"].update(out, batch[1])
        self.val_metrics["mean"].update(out)
        gathered = self.all_gather(out.mean())
        self.log("gathered", gathered.mean())

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val_{k}": v for k, v in self.val_metrics.compute().items()})
        self.val_metrics.reset()


@pytest.mark.sample
@on_ranks(2)
def test_metrics(tmp_path: Path) -> None:
    expected = fit("ddp", tmp_path, seeded(Metrics))
    assert {"train_mse", "val_mse", "val_mean", "gathered", "ranks", "largest"} <= expected.metrics.keys()
    for stage in ("zero1", "zero3"):
        assert_same(fit(stage, tmp_path, seeded(Metrics)), expected, what=stage)


class Writer(BasePredictionWriter):
    def __init__(self, root: Path, interval: Any) -> None:
        super().__init__(interval)
        self.root = root

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        torch.save((batch_indices, prediction), self.root / f"batch{trainer.global_rank}-{batch_idx}")

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save((batch_indices, predictions), self.root / f"epoch{trainer.global_rank}")


@on_ranks(2)
def test_prediction_writer(tmp_path: Path) -> None:
    rank = dist.get_rank()
    written = []
    for strategy in ("ddp", "zero3"):
        folder = tmp_path / strategy
        folder.mkdir(exist_ok=True)
        of = trainer(strategy, tmp_path, callbacks=[Writer(folder, "batch_and_epoch")], use_distributed_sampler=True)
        result = of.predict(seeded(Lit), DataLoader(Samples(), batch_size=5), return_predictions=True)
        written.append([torch.load(p) for p in sorted(folder.glob(f"*h{rank}*"))] + [result])
    torch.testing.assert_close(written[1], written[0])


@on_ranks(2)
def test_module_says_where_and_in_what_it_computes(tmp_path: Path) -> None:
    seen = []

    class Look(Lit):
        def on_fit_start(self) -> None:
            seen.append((self.device, self.dtype))

    for strategy in ("ddp", "zero3"):
        for precision in ("32-true", "bf16-true"):
            fit(strategy, tmp_path, seeded(Look), precision=precision, max_steps=1)
    assert seen[:2] == seen[2:]
