"""A call that takes all ranks, made by one: named in seconds, on all of them, however long stalls are allowed to be."""

from __future__ import annotations

import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero.ranks import waits
from lightning_zero.ranks.waits import StallError
from tests.engine.support import Model, Sharded, language_work, places_posted_often
from tests.harness import Pool


def gather_alone(stage: int) -> str:
    with places_posted_often(), mock.patch.object(waits, "ASK_S", 1.0):
        side = Sharded(Model(), stage=stage, stall_timeout_s=3600.0)
        language_work(side, 0)
        side.step()
        with pytest.raises(StallError, match=r"All ranks must call this") as caught:
            if dist.get_rank() == 0:
                with lightning_zero.gather(side.module):
                    pass
            else:
                side.engine.comm.max_(torch.zeros(1))
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_gather_on_one_rank_alone(stage: int) -> None:
    pool = Pool(2)  # of its own: messages are left over
    try:
        for said in pool.run(pickle.dumps((gather_alone, (stage,), {})), timeout=60.0):
            assert "rank 0: between passes, waits for 'gather(), which all ranks must enter'" in said
            assert "rank 1: between passes, waits for 'a small reduction'" in said
    finally:
        pool.kill()
