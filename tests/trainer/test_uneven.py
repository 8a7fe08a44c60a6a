"""Ranks with different numbers of batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.settings import ConfigError
from tests.harness import on_ranks
from tests.trainer import toys
from tests.trainer.toys import Lit, Samples, assert_same, record, seeded, strategy_of, trainer


class Some(IterableDataset[Any]):
    """``counts[rank]`` batches of two, of samples of each rank's own. ``most``: the others have no more."""

    def __init__(self, counts: tuple[int, ...], most: int | None = None) -> None:
        self.count = min(counts[dist.get_rank()], most or max(counts))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(dist.get_rank(), self.count)


def batches(rank: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
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


@on_ranks(2)
def test_an_epoch_that_ends_below_a_limit_on_all_ranks_ends_as_under_ddp(tmp_path: Path) -> None:
    """Without a step for the last batches of an accumulation: Lightning does not know that they are the last."""
    runs = []
    for strategy in ("ddp", strategy_of("zero3")):
        settings = {"limit_train_batches": 4, "accumulate_grad_batches": 2}
        of, module = trainer(strategy, tmp_path, **settings), seeded(Lit)
        of.fit(module, loader((3, 3)))
        runs.append(record(of, module))
        assert of.global_step == 2
    assert_same(*runs)


class OfTwo(Lit):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch["a"]) + super().loss(batch["b"])


@on_ranks(2)
@pytest.mark.parametrize(("mode", "alike"), [("min_size", (3, 3)), ("max_size_cycle", (3, 4))])
def test_combined_loaders_end_together(mode: str, alike: tuple[int, int], tmp_path: Path) -> None:
    """``alike``: with these numbers of batches of the first one, ranks' combined loaders have the same number."""

    def run(strategy: Any, counts: tuple[int, int], *, listed: bool = True) -> Any:
        of, module = trainer(strategy, tmp_path), seeded(OfTwo)
        parts = {"a": loader(counts, listed=listed), "b": loader((4, 4), listed=True)}
        of.fit(module, CombinedLoader(parts, mode))
        return record(of, module)

    expected = run("ddp", alike)
    for listed in (False, True):
        assert_same(run(strategy_of("zero3"), UNEVEN, listed=listed), expected, what=f"{listed}")


def plain(counts: tuple[int, ...], accumulates: int) -> dict[str, Tensor]:
    """Weights after two epochs of one process, whose gradients are means over the ranks that have a batch."""
    module = seeded(Lit)
    optimizer = module.configure_optimizers()
    for _ in range(2):
        ranks = [list(batches(rank, count)) for rank, count in enumerate(counts)]
        for step in range(max(counts)):
            losses = [module.loss(own[step]) for own in ranks if step < len(own)]
            (sum(losses) / len(losses) / accumulates).backward()
            if (step + 1) % accumulates == 0 or step + 1 == max(counts):
                optimizer.step()
                optimizer.zero_grad()
    return module.state_dict()


@on_ranks(2)
@pytest.mark.parametrize(("counts", "listed"), [(UNEVEN, False), (UNEVEN, True), ((4, 0), False)])
@pytest.mark.parametrize(("row", "accumulates"), [("zero1", 2), ("zero3", 1), ("zero3_offload", 2)])
def test_ranks_without_batches_join_with_weight_0(
    row: str, accumulates: int, counts: tuple[int, ...], listed: bool, tmp_path: Path
) -> None:
    strategy = strategy_of(row, tmp_path, uneven="join")
    of, module = trainer(strategy, tmp_path, accumulate_grad_batches=accumulates), seeded(Lit)
    of.fit(module, loader(counts, listed=listed))
    toys.assert_weights(toys.weights(of), plain(counts, accumulates))
    assert len(module.losses) == 2 * max(counts) and of.global_step == 2 * -(-max(counts) // accumulates)


@on_ranks(2)
def test_joined_epochs_count_no_tokens_of_repeated_batches(tmp_path: Path) -> None:
    """Where ranks' batches have equal numbers of tokens, means over them are means over ranks with batches."""
    strategy = strategy_of("zero3", tmp_path, uneven="join", loss="tokens")
    of, module = trainer(strategy, tmp_path), seeded(Counted)
    of.fit(module, loader(UNEVEN))
    toys.assert_weights(toys.weights(of), plain(UNEVEN, 1))


class Counted(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "tokens": len(batch[0])}


def own_batches(counts: tuple[int, ...]) -> Iterator[Any]:
    return batches(dist.get_rank(), counts[dist.get_rank()])


class Unlisted(toys.Told):
    """Does not tell how many batches it has."""

    __len__ = None  # type: ignore[assignment]


@on_ranks(2)
@pytest.mark.parametrize("kind", [toys.Told, Unlisted])
@pytest.mark.parametrize("counts", [(3, 5), (5, 3)])
@pytest.mark.parametrize(
    ("uneven", "at", "limit"),
    [
        ("join", 4, 1.0),
        ("end", 2, 1.0),
        *(
            pytest.param(*values, marks=pytest.mark.full)
            for values in (("join", 5, 1.0), ("join", 2, 4), ("end", 3, 1.0))
        ),
    ],
)
def test_each_rank_resumes_at_its_own_place(
    uneven: str, at: int, limit: Any, counts: tuple[int, ...], kind: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Also where one is out already, and after an epoch that has left batches on some."""
    path, runs, modules = tmp_path / "saved.ckpt", [], []
    for settings in ({"callbacks": [toys.saves_at(path, at)]}, {}):
        strategy = strategy_of("zero3", tmp_path, uneven=uneven, checkpoint="sharded" if at == 4 else "full")
        of, module = trainer(strategy, tmp_path, limit_train_batches=limit, **settings), seeded(Lit)
        of.fit(module, kind(own_batches(counts)), ckpt_path=None if settings else path)
        runs.append(toys.weights(of))
        modules.append(module)
    repeated = max(0, 5 - at) if uneven == "join" and counts[dist.get_rank()] < at else 0  # of another rank, weight 0
    assert modules[1].losses[repeated:] == pytest.approx(modules[0].losses[at + repeated :])
    toys.assert_weights(runs[1], runs[0])


@on_ranks(2)
def test_a_fit_goes_on_from_a_save_after_an_epoch_that_has_left_batches(tmp_path: Path) -> None:
    path, strategy = tmp_path / "saved.ckpt", strategy_of("zero3", tmp_path)
    of, module = trainer(strategy, tmp_path, max_epochs=1), seeded(Lit)
    of.fit(module, toys.Told(own_batches(UNEVEN)))
    of.save_checkpoint(path)
    of, module = trainer(strategy_of("zero3", tmp_path), tmp_path), seeded(Lit)
    of.fit(module, toys.Told(own_batches(UNEVEN)), ckpt_path=path)
    assert len(module.losses) == 3


class ByHand(Lit):
    automatic_optimization = False


class Fetches(Lit):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


@on_ranks(2)
def test_what_cannot_tell_repeated_batches_is_refused_with_join(tmp_path: Path) -> None:
    for module, what in (
        (toys.WithBatchNorm, "SyncBatchNorm"),
        (ByHand, "manual optimization"),
        (Fetches, "training_step.dataloader_iter."),
    ):
        strategy = strategy_of("zero1", tmp_path, uneven="join")
        of = trainer(strategy, tmp_path, sync_batchnorm=module is toys.WithBatchNorm)
        with pytest.raises(ConfigError, match=f"^uneven: expected end with {what}"):
            of.fit(seeded(module), loader(UNEVEN))
