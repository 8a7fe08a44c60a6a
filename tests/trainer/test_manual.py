"""Manual optimization in ways that Lightning's table (``tests/lightning_table``) does not have, beside DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero import ZeroStrategy
from tests.harness import on_ranks
from tests.trainer.toys import ByHand, assert_same, fit, seeded, strategy_of

pytestmark = pytest.mark.full


class SyncGrad(ByHand):
    """Accumulates by ``toggle_model(sync_grad=)``. The batch between two of a window has no backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if batch_idx % 3 == 1:
            return
        last = batch_idx % 3 == 2
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(loss)
        if last:
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class SeveralBackwards(ByHand):
    """Two losses of one forward and one of another, one step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.manual_backward((out - batch[1]).pow(2).mean(), retain_graph=True)
        self.manual_backward(out.abs().mean() * 0.1)
        super().training_step(batch, batch_idx)


class TorchClips(ByHand):
    """As torch's documentation has it, and by value every other step."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, *args, **kwargs)
        if len(self.losses) % 2:
            self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.1, error_if_nonfinite=True))
        else:
            nn.utils.clip_grad_value_(self.parameters(), 0.01)


class NormsOfParts(ByHand):
    """Norms of some parameters, of one parameter and of the whole."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, *args, **kwargs)
        for params in (list(self.parameters()), list(self.blocks[0].parameters()), [self.head.weight]):
            if isinstance(self.trainer.strategy, ZeroStrategy):
                norm = lightning_zero.grad_norm(params)
            else:
                norm = nn.utils.get_total_norm([p.grad for p in params])
            self.losses.append(float(norm))


class ParameterInTwoOptimizers(ByHand):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.AdamW(self.head.parameters(), lr=0.01)]


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("kind", [SyncGrad, SeveralBackwards, TorchClips, NormsOfParts, ParameterInTwoOptimizers])
def test_manual_steps_equal_ddps(kind: type[ByHand], tmp_path: Path) -> None:
    expected = fit("ddp", tmp_path, seeded(kind))
    for row in ("zero0", "zero1", "zero3", "zero3_offload"):
        assert_same(fit(strategy_of(row), tmp_path, seeded(kind)), expected, what=row)
