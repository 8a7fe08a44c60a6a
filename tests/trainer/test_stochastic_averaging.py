"""Lightning's StochasticWeightAveraging gives what it gives under DDP, and goes on from its checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor

from tests.harness import on_ranks
from tests.trainer.test_after_fit import WithBuffers, strategy_of
from tests.trainer.toys import Lit, assert_same, fit, loader, seeded

pytestmark = pytest.mark.full

CASES = [
    ("zero1", "none", Lit, "none"),
    ("zero2", "none", WithBuffers, "epoch"),
    ("zero3", "none", WithBuffers, "none"),
    ("zero3", "nvme", Lit, "epoch"),
    pytest.param("zero1", "optimizer_cpu", WithBuffers, "none", marks=pytest.mark.full),
    pytest.param("zero0", "none", WithBuffers, "none", marks=pytest.mark.full),
]


def averaging(**settings: Any) -> StochasticWeightAveraging:
    return StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2, **settings)


def make(kind: Any, scheduler: str) -> Any:
    module = seeded(kind)
    module.hparams["scheduler"] = scheduler
    return module


@on_ranks(2)
@pytest.mark.parametrize(("stage", "offload", "kind", "scheduler"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
@pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")
def test_it_gives_what_it_gives_under_ddp(stage: str, offload: str, kind: Any, scheduler: str, tmp_path: Path) -> None:
    def body(strategy: Any) -> Any:
        return fit(strategy, tmp_path, make(kind, scheduler), max_epochs=5, callbacks=[averaging()])

    expected, found = body("ddp"), body(strategy_of(stage, offload, tmp_path))
    plain = fit("ddp", tmp_path, make(kind, scheduler), max_epochs=5)
    assert not torch.equal(plain.weights["head.weight"], expected.weights["head.weight"])
    assert_same(found, expected, tolerance=0)


def ema(average: Tensor, now: Tensor, count: Tensor) -> Tensor:
    return 0.9 * average + 0.1 * now


@on_ranks(2)
@pytest.mark.parametrize(("stage", "checkpoint"), [("zero1", "full"), ("zero3", "full"), ("zero3", "sharded")], ids=str)
def test_a_run_goes_on_from_its_checkpoint(stage: str, checkpoint: str, tmp_path: Path) -> None:
    class Saves(StochasticWeightAveraging):
        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_epoch_end(trainer, *args)
            if trainer.current_epoch == 2:
                trainer.save_checkpoint(saved)

    def body(strategy: Any, ckpt_path: Path | None = None) -> Any:
        callback = Saves(0.02, swa_epoch_start=2, annealing_epochs=2, avg_fn=ema)
        module = make(WithBuffers, "none")
        return fit(strategy, tmp_path, module, callbacks=[callback], max_epochs=5, ckpt_path=ckpt_path)

    saved = tmp_path / "ddp.ckpt"
    body("ddp")
    expected = body("ddp", saved)
    saved = tmp_path / "ours.ckpt"
    whole = body(strategy_of(stage, "none", tmp_path, checkpoint=checkpoint))
    assert_same(body(strategy_of(stage, "none", tmp_path, checkpoint=checkpoint), saved), expected, tolerance=0)
    assert_same(whole, body("ddp"), tolerance=0)


@on_ranks(2)
def test_a_run_leaves_the_class_and_changes_neither_name_nor_copies(tmp_path: Path) -> None:
    callback = averaging()
    run = fit("zero3", tmp_path, make(Lit, "none"), max_epochs=3, callbacks=[callback])
    assert isinstance(callback, StochasticWeightAveraging) and callback.state_key == averaging().state_key
    assert "update_parameters" in vars(StochasticWeightAveraging)
    assert type(copy.copy(callback)) is StochasticWeightAveraging
    run.trainer.test(run.module, loader(), verbose=False)
