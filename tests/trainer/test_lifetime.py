"""After a run nothing of it stays behind that somebody does not hold."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_zero import ZeroStrategy
from lightning_zero.engine import engine_of, engines
from tests.harness import assert_gone, on_ranks
from tests.trainer.toys import Lit, fit, loader

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]

ROWS = pytest.mark.parametrize(
    ("stage", "row"), [("zero0", "none"), ("zero3", "none"), ("zero1", "optimizer_nvme"), ("zero3", "nvme")]
)


def strategy(stage: str, row: str, folder: Path) -> ZeroStrategy:
    offload = {"name": row, "nvme_path": str(folder)} if "nvme" in row else row
    return ZeroStrategy(stage, offload=offload)


def train_and_test(stage: str, row: str, averages: bool, folder: Path) -> list[weakref.ref[Any]]:
    """References to what a run was made of. A function of its own: ``save_hyperparameters`` has the frames that it
    looks through keep their variables."""
    callbacks = [EMAWeightAveraging()] if averages else []
    run = fit(strategy(stage, row, folder), folder, Lit(optimizer="adamw"), max_steps=2, callbacks=callbacks)
    run.trainer.test(run.module, loader(), verbose=False)
    of, engine = run.trainer, engine_of(run.module)
    assert engine is not None
    return [weakref.ref(o) for o in (of, run.module, of.strategy, *of.optimizers, engine, *engine.buckets, *callbacks)]


@pytest.mark.sample
@on_ranks(2, full=(1,))
@ROWS
@pytest.mark.parametrize("averages", [False, True])
def test_nothing_of_an_engine_lives_after_its_trainer_and_module(
    stage: str, row: str, averages: bool, tmp_path: Path
) -> None:
    before = len(engines())
    for _ in range(2):
        assert_gone(train_and_test(stage, row, averages, tmp_path))
        assert len(engines()) == before and not list(tmp_path.rglob(f"*{dist.get_rank()}.bin"))


@on_ranks(1, 2)
def test_files_of_a_run_that_is_over_are_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    """Also before Python has collected it."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            fit(strategy("zero3", "nvme", tmp_path), tmp_path, Lit(optimizer="adamw"), max_steps=1)
    finally:
        gc.enable()
