"""Runs of the Trainer: stages among themselves, modules that are sharded, grown or forgotten, ranks that differ.

Lightning's features beside DDP are in ``tests/lightning_table``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import ZeroStrategy
from tests.harness import on_ranks
from tests.trainer.toys import (
    ALL_STAGES,
    Fails,
    Late,
    Lit,
    Run,
    Samples,
    assert_changed,
    assert_same,
    assert_weights,
    fit,
    loader,
    record,
    seeded,
    trainer,
    weights,
)

pytestmark = pytest.mark.full

SOME = ("zero1", "zero3")  # the stages that differ most in what Lightning sees


def same_as_ddp(body: Callable[[str], Run], stages: tuple[str, ...] = SOME, **how: Any) -> None:
    """``body(strategy)`` gives what it gives under DDP."""
    expected = body("ddp")
    for stage in stages:
        assert_same(body(stage), expected, what=stage, **how)


@pytest.mark.smoke
@pytest.mark.sample
@on_ranks(2)
def test_fit_with_clipping_accumulation_and_evaluations_equals_ddp(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3, "val_check_interval": 2}
    settings |= {"num_sanity_val_steps": 1, "limit_val_batches": 2}
    same_as_ddp(lambda strategy: fit(strategy, tmp_path, **settings), ALL_STAGES)


@on_ranks(1, 3)
def test_fit_on_one_and_on_three_ranks_equals_ddp(tmp_path: Path) -> None:
    same_as_ddp(lambda s: fit(s, tmp_path, accumulate_grad_batches=3, gradient_clip_val=0.3), ALL_STAGES)


# -- other entry points -----------------------------------------------------------------------------------------------


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
    runs = [
        fit(stage, tmp_path, seeded(NothingToLearn), limit_val_batches=0, gradient_clip_val=0.4) for stage in ALL_STAGES
    ]
    for stage, run in zip(ALL_STAGES[1:], runs[1:], strict=True):
        assert_weights(run.weights, runs[0].weights, what=stage)


@on_ranks(2)
def test_fit_after_an_exception_of_all_ranks_goes_on_from_its_weights(tmp_path: Path) -> None:
    for strategy in ("zero1", "zero3"):
        module = seeded(lambda: Fails(3))
        of = trainer(strategy, tmp_path)
        with pytest.raises(KeyError, match="planned"):
            of.fit(module, loader())
        module.ranks = ()
        module.losses.clear()
        found = fit(strategy, tmp_path, module, limit_val_batches=0)
        three = seeded(Lit)
        fit(strategy, tmp_path, three, max_steps=3, limit_val_batches=0)
        three.losses.clear()
        assert_same(found, fit(strategy, tmp_path, three, limit_val_batches=0), tolerance=0, what=strategy)


class Tuned(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(96), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(8), batch_size=self.batch_size)


@on_ranks(1)
def test_batch_size_finder_on_one_rank_finds_what_it_finds_without_us(tmp_path: Path) -> None:
    """On several it refuses, whatever the strategy."""
    results = []
    for strategy in ("auto", "zero3"):
        module = seeded(Tuned)
        finder = BatchSizeFinder(max_trials=3, steps_per_trial=2)
        of = trainer(strategy, tmp_path, max_steps=4, callbacks=[finder])
        of.fit(module)
        results.append((module.batch_size, record(of, module)))
    assert results[0][0] == results[1][0] == 8
    assert_weights(results[1][1].weights, results[0][1].weights)


# -- configure_model --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_module_configured_on_meta_is_the_same_at_all_stages_and_learns(tmp_path: Path) -> None:
    """Other initial values than on the host, but the same at all stages, finite, and they learn."""
    runs = []
    for stage in ALL_STAGES:
        module = seeded(Late)
        of = trainer(stage, tmp_path, max_epochs=3)
        of.validate(module, loader(), verbose=False)
        before = weights(of)
        assert all(torch.isfinite(value).all() for value in before.values())
        of.fit(module, loader(), loader())
        runs.append(record(of, module))
        assert_changed(before, runs[-1].weights)
        epoch = len(runs[-1].losses) // 3
        assert sum(runs[-1].losses[-epoch:]) < sum(runs[-1].losses[:epoch])
    for run in runs[1:]:
        assert_same(run, runs[0])


@on_ranks(2)
def test_init_module_builds_on_meta(tmp_path: Path) -> None:
    of = trainer("zero3", tmp_path, max_epochs=1)
    with of.init_module(empty_init=True):
        module = Lit()
    assert all(p.is_meta for p in module.parameters())
    of.fit(module, loader())
    assert all(torch.isfinite(value).all() for value in weights(of).values())


# -- hooks ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_module_goes_to_torchscript_and_into_a_pickle_after_fit(stage: str, tmp_path: Path) -> None:
    class Small(Lit):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.first(x))

    module = fit(stage, tmp_path, seeded(Small), max_steps=2).module
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    with lightning_zero.gather(module):
        expected = module(x)
        scripted = module.to_torchscript(tmp_path / f"script{dist.get_rank()}.pt")
        traced = module.to_torchscript(method="trace", example_inputs=x)
        assert torch.equal(scripted(x), expected) and torch.equal(traced(x), expected)
        torch.save(module.first, tmp_path / f"part{dist.get_rank()}.pt")
    loaded = torch.jit.load(tmp_path / f"script{dist.get_rank()}.pt")
    assert torch.equal(loaded(x), expected)
    assert torch.load(tmp_path / f"part{dist.get_rank()}.pt", weights_only=False)(x).shape == (2, 8)
