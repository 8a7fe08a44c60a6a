"""Runs of the Trainer: stages among themselves, modules that are sharded, grown or forgotten, ranks that differ.

Lightning's features beside DDP are in ``tests/lightning_table``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_zero
from lightning_zero import ZeroStrategy
from tests.harness import on_ranks
from tests.trainer.toys import (
    ALL_STAGES,
    ByHand,
    Fails,
    Late,
    Lit,
    assert_same,
    assert_weights,
    fit,
    seeded,
    strategy_of,
)

pytestmark = pytest.mark.full


def assert_as_ddp(root: Path, **settings: Any) -> None:
    settings |= {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3}
    expected = fit("ddp", root, **settings)
    for stage in ALL_STAGES:
        assert_same(fit(stage, root, **settings), expected, what=stage)


@pytest.mark.smoke
@pytest.mark.sample
@on_ranks(2)
def test_fit_with_clipping_accumulation_and_evaluations_equals_ddp(tmp_path: Path) -> None:
    assert_as_ddp(tmp_path, val_check_interval=2, num_sanity_val_steps=1, limit_val_batches=2)


@on_ranks(1, 3)
def test_fit_on_one_and_on_three_ranks_equals_ddp(tmp_path: Path) -> None:
    assert_as_ddp(tmp_path)


@on_ranks(2)
def test_sharded_module_is_refused_by_another_strategy_until_it_is_released(tmp_path: Path) -> None:
    module = seeded(Lit)
    of = fit(ZeroStrategy("zero3", gather_after_fit=False), tmp_path, module).trainer
    with pytest.raises(RuntimeError, match="sharded"):
        fit("ddp", tmp_path, module)
    of.strategy.connect(module)
    of.strategy.engine.release()
    fit("ddp", tmp_path, module)


@on_ranks(2)
def test_ranks_with_different_seeds_start_from_rank_0s_weights(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    for stage in ("zero0", "zero3"):
        module = seeded(Lit, seed=3 + rank)
        run = fit(stage, tmp_path, module, limit_val_batches=0)
        assert_same(run, fit("ddp", tmp_path, seeded(Lit, seed=3 + rank), limit_val_batches=0), what=stage)
        with lightning_zero.gather(module):
            mine = torch.cat([p.detach().flatten() for p in module.parameters()])
        theirs = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(theirs, mine)
        assert torch.equal(theirs[0], theirs[1])


class NothingToLearn(Lit):
    """One rank's batches give no parameter a gradient in every other step; it does not even call its layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2 and dist.is_initialized() and dist.get_rank() == 1:
            return torch.zeros((), requires_grad=True)
        return self.loss(batch)


@pytest.mark.sample
@on_ranks(2)
def test_rank_without_any_gradient_steps_with_the_others(tmp_path: Path) -> None:
    """It steps with the others, on half of the other rank's gradient."""
    settings: dict[str, Any] = {"limit_val_batches": 0, "gradient_clip_val": 0.4}
    first, *others = [fit(stage, tmp_path, seeded(NothingToLearn), **settings) for stage in ALL_STAGES]
    for run in others:
        assert_weights(run.weights, first.weights)


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_fit_after_an_exception_of_all_ranks_goes_on_from_its_weights(stage: str, tmp_path: Path) -> None:
    module, three = seeded(lambda: Fails(3)), seeded(Lit)
    with pytest.raises(KeyError, match="planned"):
        fit(stage, tmp_path, module)
    fit(stage, tmp_path, three, max_steps=3, limit_val_batches=0)
    module.ranks = ()
    for one in (module, three):
        one.losses.clear()
    found, expected = (fit(stage, tmp_path, one, limit_val_batches=0) for one in (module, three))
    assert_same(found, expected, tolerance=0)


@on_ranks(2)
def test_module_configured_on_meta_is_the_same_at_all_stages_and_learns(tmp_path: Path) -> None:
    """Other initial values than on the host, but the same at all stages, finite, and they learn."""
    runs = []
    for stage in ALL_STAGES:
        runs.append(fit(stage, tmp_path, seeded(Late), max_epochs=3))
        losses = runs[-1].losses
        epoch = len(losses) // 3
        assert sum(losses[-epoch:]) < sum(losses[:epoch])
        assert_same(runs[-1], runs[0])


# -- manual optimization ----------------------------------------------------------------------------------------------


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


class ParameterInTwoOptimizers(ByHand):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.AdamW(self.head.parameters(), lr=0.01)]


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("kind", [SyncGrad, ParameterInTwoOptimizers])
def test_manual_steps_equal_ddps(kind: type[ByHand], tmp_path: Path) -> None:
    expected = fit("ddp", tmp_path, seeded(kind))
    for row in ("zero0", "zero1", "zero3", "zero3_offload"):
        assert_same(fit(strategy_of(row), tmp_path, seeded(kind)), expected, what=row)
