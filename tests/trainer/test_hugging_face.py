"""Models of transformers in a LightningModule: in from their files, trained, saved, resumed, and out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_zero import ZeroStrategy
from tests.engine.test_pretrained import CONFIGS, make, saved, transformers
from tests.harness import on_ranks
from tests.trainer.toys import assert_weights, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Lit(pl.LightningModule):
    """
    Args:
        folder: from_pretrained in configure_model; None: built on meta, for ``zero.init_from`` or a checkpoint.
    """

    def __init__(self, kind: str, folder: Path | None = None) -> None:
        super().__init__()
        self.kind, self.folder = kind, folder
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            if self.folder is None:
                self.model = make(self.kind, "meta")
            else:
                self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(self.model(batch, labels=batch).loss.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def batches() -> DataLoader[Any]:
    data = torch.randint(3, 64, (16, 8), generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))  # type: ignore[arg-type]


def fit(module: Lit, root: Path, epochs: int = 1, ckpt_path: Path | None = None, **settings: Any) -> pl.Trainer:
    of = trainer(ZeroStrategy(**{"stage": "zero3", "summary": False, **settings}), root, max_epochs=epochs)
    of.fit(module, batches(), ckpt_path=ckpt_path)
    return of


@on_ranks(2)
@pytest.mark.parametrize("kind", CONFIGS)
def test_from_pretrained_and_from_the_folder_train_the_same(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path / "in")
    one, other = Lit(kind, tmp_path / "in"), Lit(kind)
    first = weights(fit(one, tmp_path))
    second = weights(fit(other, tmp_path, init_from=str(tmp_path / "in")))
    assert one.losses == other.losses
    assert_weights(second, first, tolerance=0)


@on_ranks(2)
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_a_model_on_meta_goes_on_from_a_checkpoint(checkpoint: str, tmp_path: Path) -> None:
    """Which then is what its parameters are made of: there is no other source."""
    saved("llama", tmp_path / "in")
    settings = {"checkpoint": checkpoint, "init_from": str(tmp_path / "in")}
    whole = Lit("llama")
    fit(whole, tmp_path, 2, **settings)
    fit(Lit("llama"), tmp_path, 1, **settings).save_checkpoint(tmp_path / "one.ckpt")
    rest = Lit("llama")
    of = fit(rest, tmp_path, 2, ckpt_path=tmp_path / "one.ckpt", checkpoint=checkpoint)
    assert rest.losses == whole.losses[-len(rest.losses) :]
    test = Lit("llama")
    check = trainer(ZeroStrategy("zero1", summary=False), tmp_path)
    check.test(test, batches(), ckpt_path=tmp_path / "one.ckpt", verbose=False)
    of.save_checkpoint(tmp_path / "two.ckpt")
