"""zero.vertical_chunks under a Trainer: the run of accumulate_grad_batches, with the whole batch in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError
from tests.harness import on_ranks
from tests.trainer.toys import Lit, assert_weights, loader, seeded, trainer, weights

pytestmark = pytest.mark.full


def in_parts(parts: int, stage: int = 3, how: str = "blocks") -> ZeroStrategy:
    return ZeroStrategy(stage, vertical_chunks=parts, activation_checkpointing=how)


def fit(
    module: pl.LightningModule, strategy: ZeroStrategy, data: Any, root: Path, **settings: Any
) -> dict[str, Tensor]:
    run = trainer(strategy, root, **settings)
    run.fit(module, data, **({"val_dataloaders": loader(3)} if isinstance(module, Lit) else {}))
    return weights(run)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("stage", "accumulate"), [(3, 1), (1, 2)])
def test_run_in_chunks_is_that_of_accumulation(stage: int, accumulate: int, tmp_path: Path) -> None:
    one = seeded(Lit)
    settings: dict[str, Any] = {"gradient_clip_val": 0.5}
    batches = loader(1 if accumulate == 2 else 2)
    plain = fit(one, ZeroStrategy(stage), batches, tmp_path, accumulate_grad_batches=2 * accumulate, **settings)
    other = seeded(Lit)
    batches = loader(2 if accumulate == 2 else 4)
    found = fit(other, in_parts(2, stage), batches, tmp_path, accumulate_grad_batches=accumulate, **settings)
    assert_weights(found, plain, tolerance=1e-5)
    assert one.evaluated == pytest.approx(other.evaluated, rel=1e-4)  # of batches of three, which do not divide
    assert len(other.losses) == len(one.losses) // 2


@on_ranks(1)
@pytest.mark.parametrize(("size", "got"), [(3, "3 samples"), (20, "4 samples")])
def test_batches_that_will_not_divide_are_refused_before_the_first(size: int, got: str, tmp_path: Path) -> None:
    module = seeded(Lit)
    with pytest.raises(ConfigError, match=f"got a batch of {got}"):
        trainer(in_parts(5), tmp_path).fit(module, loader(size))
    assert not module.losses and dist.is_initialized()
    if size == 20:  # a first batch that divides, and no other
        trainer(in_parts(5), tmp_path, limit_train_batches=1, max_epochs=1).fit(module, loader(size))
        assert len(module.losses) == 1
