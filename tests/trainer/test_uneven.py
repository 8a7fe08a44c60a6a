"""Ranks with different numbers of batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.harness import on_ranks
from tests.trainer import toys
from tests.trainer.toys import Lit, Samples, assert_same, record, seeded, strategy_of, trainer


class Some(IterableDataset[Any]):
    """``counts[rank]`` batches of two, of samples of each rank's own. ``most``: the others have no more."""

    def __init__(self, counts: tuple[int, ...], most: int | None = None) -> None:
        self.count = min(counts[dist.get_rank()], most or max(counts))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        for _ in range(self.count):
            x = torch.randn(2, toys.FEATURES, generator=generator)
            yield x, x.sum(1, keepdim=True).sin()


class Listed(Some):
    def __len__(self) -> int:
        return self.count


def loader(counts: tuple[int, ...], most: int | None = None, *, listed: bool = False) -> DataLoader[Any]:
    return DataLoader((Listed if listed else Some)(counts, most), batch_size=None)


UNEVEN, EVEN = (3, 5), (4, 4)


class OfSeveral(Lit):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().predict_step(batch, batch_idx)


@on_ranks(2)
@pytest.mark.parametrize(("listed", "limit"), [(False, 1.0), (False, 4), (True, 1.0)])
def test_an_evaluation_goes_on_until_all_ranks_are_done(listed: bool, limit: float, tmp_path: Path) -> None:
    limits = dict.fromkeys(["limit_val_batches", "limit_predict_batches"], limit)
    runs = []
    for row in ("ddp", "zero3", "zero3_offload"):
        strategy = row if row == "ddp" else strategy_of(row, tmp_path)
        of, module = trainer(strategy, tmp_path, val_check_interval=2, **limits), seeded(OfSeveral)
        several = [loader(UNEVEN, listed=listed), loader((4, 1), listed=listed)]
        of.fit(module, loader(EVEN, listed=True), several[0])
        runs.append((record(of, module), of.predict(module, several)))
        runs[-1][0].losses += module.evaluated
    for found, predicted in runs[1:]:
        assert_same(found, runs[0][0])
        torch.testing.assert_close(predicted, runs[0][1])


@on_ranks(2)
def test_predictions_of_a_number_of_samples_that_ranks_do_not_divide(tmp_path: Path) -> None:
    """By Lightning's own sampler, which repeats none."""
    settings = {"use_distributed_sampler": True}
    expected, found = (
        trainer(strategy, tmp_path, **settings).predict(seeded(Lit), DataLoader(Samples(7)))
        for strategy in ("ddp", strategy_of("zero3"))
    )
    assert len(found or []) == 4 - dist.get_rank()
    torch.testing.assert_close(found, expected)


@on_ranks(2)
@pytest.mark.parametrize(
    "settings", [{}, {"accumulate_grad_batches": 2}, {"limit_train_batches": 4}, {"limit_train_batches": 2}]
)
def test_an_epoch_of_training_ends_with_the_last_batch_that_all_ranks_have(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    limit = settings.get("limit_train_batches", float("inf"))
    expected = trainer("ddp", tmp_path, **settings), seeded(Lit)
    expected[0].fit(expected[1], loader(UNEVEN, most=3))
    for row in ("zero1", "zero3"):
        for listed in (False, True):
            of, module = trainer(strategy_of(row), tmp_path, **settings), seeded(Lit)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                of.fit(module, loader(UNEVEN, listed=listed))
            assert_same(record(of, module), record(*expected), what=f"{row} {listed}")
            assert of.num_training_batches == (min(3, limit) if listed else limit)
            found = [str(w.message) for w in said if "different numbers of batches" in str(w.message)]
            assert len(found) == (dist.get_rank() == 0 and limit > 3), found
            more = min(5, limit) if listed else "3 and more"
            assert not found or f"(3 on rank 0, {more} on rank 1)" in found[0]
