"""Averages of weights: what Lightning's table (``tests/lightning_table``) does not show of them.

That is resuming from DDP's file and from one without averages, low precision, subclasses and mocks of users.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks as cb
from torch import nn

from lightning_zero import ZeroStrategy
from tests.harness import on_ranks
from tests.trainer.toys import Lit, WithBatchNorm, assert_same, assert_weights, fit, seeded

pytestmark = pytest.mark.full


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("ddp", "zero3"), ("zero1", "ddp")])
def test_runs_go_on_from_averages_of_ddp_and_ddp_from_ours(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    def run(strategy: str, epochs: int, seed: int = 3, **settings: Any) -> Any:
        save = cb.ModelCheckpoint(tmp_path / f"{strategy}{epochs}", filename="end")
        settings |= {"callbacks": [cb.EMAWeightAveraging(decay=0.8), save], "enable_checkpointing": True}
        return fit(strategy, tmp_path, seeded(WithBatchNorm, seed), max_epochs=epochs, **settings)

    whole, saved, path = run("ddp", 3), run(saved_by, 2), tmp_path / f"{saved_by}2" / "end.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    assert {"current_model_state", "averaging_state"} <= checkpoint.keys()
    assert_weights(checkpoint["state_dict"], saved.weights)
    resumed = run(loaded_by, 3, ckpt_path=path, seed=5)
    assert_weights(resumed.weights, whole.weights)
    torch.testing.assert_close(resumed.losses, whole.losses[-len(resumed.losses) :], rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_checkpoint_without_averages_starts_both(tmp_path: Path) -> None:
    fit("zero3", tmp_path).trainer.save_checkpoint(tmp_path / "plain.ckpt")

    def body(strategy: str) -> Any:
        callbacks = [cb.EMAWeightAveraging(decay=0.8)]
        return fit(strategy, tmp_path, max_epochs=3, callbacks=callbacks, ckpt_path=tmp_path / "plain.ckpt")

    assert_same(body("zero3"), body("ddp"))


@on_ranks(2)
def test_averages_of_bf16_mixed_are_of_the_fp32_masters(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "bf16-mixed"}
    runs = [fit(s, tmp_path, callbacks=[cb.EMAWeightAveraging(decay=0.5)], **settings) for s in ("zero0", "zero3")]
    assert_same(runs[1], runs[0], tolerance=0)
    last = fit("zero3", tmp_path, **settings).weights["head.weight"]
    rounded = runs[0].weights["head.weight"]
    assert not torch.equal(rounded, rounded.bfloat16().float()) and not torch.equal(rounded, last)


@on_ranks(2)
@pytest.mark.parametrize(("stage", "checkpoint"), [("zero1", "full"), ("zero3", "sharded")], ids=str)
def test_stochastic_averaging_goes_on_from_its_file_as_under_ddp(stage: str, checkpoint: str, tmp_path: Path) -> None:
    class Saves(cb.StochasticWeightAveraging):
        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_epoch_end(trainer, *args)
            if trainer.current_epoch == 2:
                trainer.save_checkpoint(saved)

    def body(strategy: Any, ckpt_path: Path | None = None) -> Any:
        ema = lambda average, now, count: 0.9 * average + 0.1 * now  # noqa: E731
        callback = Saves(0.02, swa_epoch_start=2, annealing_epochs=2, avg_fn=ema)
        return fit(strategy, tmp_path, seeded(WithBatchNorm), callbacks=[callback], max_epochs=5, ckpt_path=ckpt_path)

    saved = tmp_path / "ddp.ckpt"
    body("ddp")
    expected = body("ddp", saved)
    saved = tmp_path / "ours.ckpt"
    whole = body(ZeroStrategy(stage, checkpoint=checkpoint))
    assert_same(body(ZeroStrategy(stage, checkpoint=checkpoint), saved), expected, tolerance=0)
    assert_same(whole, body("ddp"), tolerance=0)


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_random_masks_of_pruning_are_the_same_on_all_ranks(stage: str, tmp_path: Path) -> None:
    module, seen = seeded(Lit), list[bool]()
    for block in module.blocks:
        block.norm = nn.Identity()  # whose weights have one dimension

    def look(of: Any, module: Any, *_: Any) -> None:
        for mask in [buffer for name, buffer in module.named_buffers() if name.endswith("_mask")]:
            other = mask.clone()
            dist.broadcast(other, 0)
            seen.append(torch.equal(mask, other))

    torch.manual_seed(5 + dist.get_rank())
    callbacks = [cb.ModelPruning("random_unstructured", amount=0.4), cb.LambdaCallback(on_train_batch_start=look)]
    fit(stage, tmp_path, module, callbacks=callbacks)
    assert seen and all(seen)
