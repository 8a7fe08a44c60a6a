"""ModelPruning draws the same random masks on all ranks (the rest is in ``tests/lightning_table``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning
from torch import nn

from tests.harness import on_ranks
from tests.trainer.toys import Lit, fit, seeded

pytestmark = pytest.mark.full


class Looks(Lit):
    """Without layer norms, whose weights have one dimension. Compares masks with those of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []
        for block in self.blocks:
            block.norm = nn.Identity()

    def on_train_batch_start(self, *_: Any) -> None:
        for mask in [buffer for name, buffer in self.named_buffers() if name.endswith("_mask")]:
            other = mask.clone()
            dist.broadcast(other, 0)
            self.seen.append(torch.equal(mask, other))


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_random_masks_are_the_same_on_all_ranks(stage: str, tmp_path: Path) -> None:
    module = seeded(Looks)
    torch.manual_seed(5 + dist.get_rank())
    fit(stage, tmp_path, module, callbacks=[ModelPruning("random_unstructured", amount=0.4)])
    assert module.seen and all(module.seen)
