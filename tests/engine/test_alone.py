"""A call that takes all ranks, made by one: named in seconds, on all of them, however long stalls are allowed to be."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.comm.agreements import ApartError
from lightning_zero.ranks import waits
from lightning_zero.ranks.waits import StallError
from tests.engine.support import Model, Sharded, language_work, places_posted_often
from tests.harness import Pool
from tests.trainer.toys import Lit, Samples, fit, seeded


def in_a_pool(function: Callable[..., Any], *args: Any) -> list[Any]:
    pool = Pool(2)  # of its own: messages are left over
    try:
        return pool.run(pickle.dumps((function, args, {})), timeout=60.0)
    finally:
        pool.kill()


def gather_alone(stage: int) -> str:
    with places_posted_often(), mock.patch.object(waits, "ASK_S", 0.5):
        side = Sharded(Model(), stage=stage, stall_timeout_s=3600.0)
        language_work(side, 0)
        side.step()
        with pytest.raises(StallError, match=r"All ranks must call this, or none") as caught:
            if dist.get_rank() == 0:
                with lightning_zero.gather(side.module):
                    pass
            else:
                side.engine.comm.max_(torch.zeros(1))
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_gather_on_one_rank_alone(stage: int) -> None:
    for said in in_a_pool(gather_alone, stage):
        assert "rank 0: between passes, waits for 'gather(), which all ranks must enter'" in said
        assert "rank 1: between passes, waits for 'a small reduction'" in said


class Alone(Lit):
    """Rank 0 does something alone, in the middle of a fit."""

    def __init__(self, what: str, folder: str) -> None:
        super().__init__()
        self.what, self.folder = what, folder

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 3 or self.global_rank != 0:
            return
        if self.what == "gather":
            with lightning_zero.gather(self):
                pass
        elif self.what == "call":
            with torch.no_grad():
                self(Samples()[0][0][None])
        else:
            self.trainer.save_checkpoint(Path(self.folder) / "saved.ckpt")


def in_a_fit(stage: str, what: str, folder: str) -> str:
    with places_posted_often(), mock.patch.object(waits, "ASK_S", 0.5):
        strategy = ZeroStrategy(stage, stall_timeout_s=3600.0)
        module = seeded(lambda: Alone(what, folder))
        if what == "call" and stage == "zero1":  # parameters are whole on all ranks: it works, as under DDP
            found, expected = fit(strategy, folder, module), fit("ddp", folder, seeded(Lit))
            assert found.losses == expected.losses
            return ""
        with pytest.raises((StallError, ApartError)) as caught:
            fit(strategy, folder, module, limit_val_batches=0)
    return str(caught.value)


NAMES = {
    "gather": "gather(), which all ranks must enter",
    "call": "a call of the module outside of a step, which all ranks must make",
    "save": "saving a checkpoint: who sees it",
}


@pytest.mark.sample
@pytest.mark.parametrize("what", list(NAMES))
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_in_a_fit(stage: str, what: str, tmp_path: Path) -> None:
    for said in in_a_pool(in_a_fit, stage, what, str(tmp_path)):
        if said:
            print(said)
            assert f"waits for '{NAMES[what]}'" in said and "ll ranks must" in said
            assert "rank 1: " in said
