"""After a run nothing of it stays behind that somebody does not hold."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_zero.engine import engine_of, engines
from tests.harness import assert_gone, on_ranks
from tests.trainer.toys import Lit, fit, loader, strategy_of

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]


def train_and_test(row: str, averages: bool, folder: Path) -> list[weakref.ref[Any]]:
    """References to what a run was made of. A function of its own: ``save_hyperparameters`` has the frames that it
    looks through keep their variables."""
    callbacks = [EMAWeightAveraging()] if averages else []
    run = fit(strategy_of(row, folder), folder, Lit(optimizer="adamw"), max_steps=2, callbacks=callbacks)
    run.trainer.test(run.module, loader(), verbose=False)
    of, engine = run.trainer, engine_of(run.module)
    assert engine is not None
    return [weakref.ref(o) for o in (of, run.module, of.strategy, *of.optimizers, engine, *engine.buckets, *callbacks)]


@pytest.mark.sample
@on_ranks(2, full=(1,))
@pytest.mark.parametrize("row", ["zero0", "zero3", "zero1 optimizer_nvme", "zero3_nvme"])
@pytest.mark.parametrize("averages", [False, True])
def test_engine_module_and_threads_go_with_their_trainer(row: str, averages: bool, tmp_path: Path) -> None:
    before, threads = len(engines()), []
    for _ in range(4):
        assert_gone(train_and_test(row, averages, tmp_path))
        assert len(engines()) == before and not list(tmp_path.rglob(f"*{dist.get_rank()}.bin"))
        threads.append(_threads())
    # Process groups are used again. Threads that have done their work (a backward's, say) may take a while to end.
    deadline = time.monotonic() + 30
    while (left := _threads()) > threads[1] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left <= threads[1], (threads, left)


def _threads() -> int:
    """How many threads this process has, those of C++ among them."""
    return len(os.listdir("/proc/self/task"))


@on_ranks(1, 2)
def test_files_of_a_run_before_are_not_in_the_way(tmp_path: Path) -> None:
    """Also before Python has collected it."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            fit(strategy_of("zero3_nvme", tmp_path), tmp_path, Lit(optimizer="adamw"), max_steps=1)
    finally:
        gc.enable()
