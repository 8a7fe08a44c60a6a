"""A resumed run has the losses of one that was not interrupted, to the bit, whatever draws random numbers."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero.checkpoint.rng import Generators
from lightning_zero.data.resumable import ResumableLoader
from lightning_zero.trainer.saves.random_numbers import KEY
from tests.harness import on_ranks, run
from tests.trainer.toys import At, Dropping, Samples, seeded, trainer

pytestmark = pytest.mark.full

CPU = torch.device("cpu")
STEPS = 6  # of an epoch


def noise() -> float:
    """A number of each generator."""
    return (random.random() + float(np.random.rand()) + float(torch.rand(()))) / 3


class Noisy(Dropping):
    """Dropout, noise in each step and in hooks. Ranks draw other numbers from the start on."""

    def __init__(self, at: int = -1) -> None:
        super().__init__(lr=0.01)
        self.at = at  # the step in which this process gets SIGTERM
        self.drawn: list[float] = []

    def on_fit_start(self) -> None:
        Generators.seeded(100 + dist.get_rank(), CPU).restore(CPU)

    def on_train_start(self) -> None:
        noise()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.drawn.append(noise())
        if self.global_step == self.at and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss * self.drawn[-1]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        noise()
        super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        noise()


class NoisySamples(Samples):
    """Augmented at random."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + noise(), y


def other() -> Noisy:
    """To load into: with other weights, in a process that is seeded as it was, which is what loaders shuffle by."""
    module: Noisy = seeded(Noisy, seed=9)
    pl.seed_everything(3, verbose=False)
    return module


def train(
    root: Path,
    *,
    resumable: bool = True,
    stage: str = "zero3",
    module: Any = None,
    workers: int = 0,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> tuple[Noisy, pl.Trainer]:
    module = seeded(Noisy) if module is None else module
    of = trainer(stage, root, **{"max_epochs": 3, "enable_checkpointing": True, **settings})
    of.strategy.saves_on_sigterm = module.at >= 0
    data: Any = NoisySamples(2 * STEPS * dist.get_world_size())
    if resumable:
        loader: Any = ResumableLoader(data, 2, trainer=of, num_workers=workers)
    else:
        loader = DataLoader(data, 2, shuffle=True, num_workers=workers)
        of.limit_train_batches = STEPS
    with pytest.raises(SystemExit) if module.at >= 0 else nullcontext():
        of.fit(module, loader, DataLoader(Samples(8), 2), ckpt_path=ckpt_path)
    of.strategy.barrier()
    return module, of


def saves(root: Path) -> Callback:
    """Save where users do."""

    def to(name: str) -> Any:
        return lambda of, *_: of.save_checkpoint(root / f"{name}-{of.global_step}.ckpt")

    in_epoch = lambda of, *_: of.global_step in (2, STEPS + 1) and to("batch")(of)  # noqa: E731
    return LambdaCallback(on_train_batch_end=in_epoch, on_validation_end=to("validation"), on_exception=to("failed"))


def assert_goes_on(path: Path, whole: Noisy, step: int, **settings: Any) -> None:
    """A run that is resumed from ``path`` goes on like the whole one from ``step``."""
    again, _ = train(path.parent, module=other(), ckpt_path=path, **settings)
    assert again.losses == whole.losses[step:]
    assert again.drawn == whole.drawn[step:]
    assert len(set(whole.losses)) == 3 * STEPS


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_run_resumed_at_the_end_of_an_epoch_draws_the_same_numbers(stage: str, tmp_path: Path) -> None:
    """With any loader that shuffles by torch's generator, here another order on each rank."""
    at_end = ModelCheckpoint(tmp_path, save_top_k=-1, filename="epoch-{step}", save_on_train_epoch_end=True)
    whole, _ = train(tmp_path, resumable=False, stage=stage, callbacks=[at_end, saves(tmp_path)])
    for name, step in itertools.product(("epoch-step=", "validation-"), (STEPS, 2 * STEPS)):
        assert_goes_on(tmp_path / f"{name}{step}.ckpt", whole, step, resumable=False, stage=stage)


@pytest.mark.sample
@on_ranks(2, full=[1, 3])
def test_run_resumed_in_an_epoch_draws_the_same_numbers(tmp_path: Path) -> None:
    """Also from a step that has failed, and is done again."""
    whole, _ = train(tmp_path, callbacks=[saves(tmp_path)])
    fails = At("on_before_backward", {2: lambda _: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, callbacks=[saves(tmp_path), fails])
    later = STEPS + 1
    for name, step in ((f"batch-{later}", later), ("batch-2", 2), (f"validation-{STEPS}", STEPS), ("failed-2", 2)):
        assert_goes_on(tmp_path / f"{name}.ckpt", whole, step)


@on_ranks(2)
@pytest.mark.parametrize(("at", "resumable"), [(1, True), (STEPS - 1, True), (STEPS - 1, False), (STEPS + 2, True)])
def test_run_resumed_after_a_signal_draws_the_same_numbers(at: int, resumable: bool, tmp_path: Path) -> None:
    """The next batch is fetched already, and will be once more. At the end of an epoch any loader will do."""
    whole, _ = train(tmp_path, resumable=resumable)
    train(tmp_path, resumable=resumable, module=seeded(lambda: Noisy(at)))
    assert_goes_on(tmp_path / "hpc_ckpt_1.ckpt", whole, at + 1, resumable=resumable)


@on_ranks(2)
@pytest.mark.parametrize("resumable", [False, True])
def test_run_resumed_from_a_save_after_it_draws_the_same_numbers_in_workers(resumable: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"resumable": resumable, "workers": 1}
    whole, _ = train(tmp_path, **settings)
    first, of = train(tmp_path, max_epochs=None, max_steps=STEPS, **settings)
    assert first.losses == whole.losses[:STEPS]
    of.save_checkpoint(tmp_path / "after.ckpt")
    assert_goes_on(tmp_path / "after.ckpt", whole, STEPS, **settings)


def _one_epoch(root: Path) -> None:
    train(root, max_epochs=None, max_steps=STEPS)[1].save_checkpoint(root / "one.ckpt")


def _go_on(root: Path) -> tuple[list[float], list[str]]:
    with mock.patch("lightning_zero.trainer.saves.checkpointing.rank_zero_info") as info:
        module, _ = train(root, module=other(), max_epochs=2, ckpt_path=root / "one.ckpt")
    return module.drawn, [call.args[0] for call in info.call_args_list]


def test_other_numbers_of_ranks_go_on_with_seeds_of_their_own(tmp_path: Path) -> None:
    run(2, _one_epoch, tmp_path)
    first, again = run(3, _go_on, tmp_path), run(3, _go_on, tmp_path)
    assert [drawn for drawn, _ in first] == [drawn for drawn, _ in again]
    assert len({tuple(drawn) for drawn, _ in first}) == 3
    assert re.search("of 2 ranks: each of the 3 ranks.*max_steps are not scaled", "".join(first[0][1]))
    assert not run(2, _go_on, tmp_path)[0][1]


@on_ranks(2)
def test_checkpoints_without_random_numbers_load(tmp_path: Path) -> None:
    """DDP's; and ours under DDP, and for an evaluation."""
    train(tmp_path, stage="ddp", max_epochs=None, max_steps=STEPS)[1].save_checkpoint(tmp_path / "ddp.ckpt")
    module, of = train(tmp_path, ckpt_path=tmp_path / "ddp.ckpt")
    assert len(module.losses) == 2 * STEPS
    of.save_checkpoint(tmp_path / "ours.ckpt")
    assert torch.load(tmp_path / "ours.ckpt", weights_only=True)[KEY]["now"]["torch"].shape[0] == 2
    module, _ = train(tmp_path, stage="ddp", ckpt_path=tmp_path / "ours.ckpt")
    assert module.losses == []
    trainer("zero3", tmp_path).test(module, DataLoader(Samples(8)), ckpt_path=tmp_path / "ours.ckpt", verbose=False)
