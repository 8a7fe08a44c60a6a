"""A balance loss of experts over the batch of all ranks, as docs/tensor_parallel.md writes it, beside one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.lightning_api import pl
from tests.engine.support import sgd
from tests.engine.test_tensor_parallel import STEPS, batch, of_transformers, own_rows
from tests.harness import on_ranks
from tests.trainer.toys import trainer, weights


class Mixture(pl.LightningModule):
    def __init__(self, sharing: int) -> None:
        super().__init__()
        self.model: Any = of_transformers("qwen3_moe")
        self.model.router_aux_loss_coef = 0.0
        self.sharing = sharing

    def training_step(self, tokens: Tensor, number: int) -> Tensor:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        out = self.model(input_ids=tokens, labels=tokens, output_router_logits=True)
        logits = out.router_logits
        if self._trainer is not None:
            logits = tuple(self.all_gather(one, sync_grads=True).flatten(0, 1) for one in logits)
        loss: Tensor = out.loss + load_balancing_loss_func(logits, num_experts=4, top_k=2)
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())

    def train_dataloader(self) -> Any:
        mine = [batch(step, own_rows(self.sharing)) for step in range(STEPS)]
        return DataLoader(torch.cat(mine), len(mine[0]))


@pytest.mark.full
@on_ranks(4)
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_a_balance_loss_over_all_ranks_is_that_of_the_whole_batch(tensor: int, expert: int, tmp_path: Path) -> None:
    expected = Mixture(1)
    optimizer = expected.configure_optimizers()
    for step in range(STEPS):
        expected.training_step(batch(step), step).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 3):
        strategy = ZeroStrategy(stage, tensor_parallel=tensor, expert_parallel=expert)
        fitted = trainer(strategy, tmp_path, max_epochs=1, gradient_clip_val=0.5)
        fitted.fit(Mixture(tensor))
        torch.testing.assert_close(weights(fitted), expected.state_dict(), rtol=0, atol=2e-6)
