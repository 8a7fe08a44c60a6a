"""Hooks around a step, and a gather that fails on its way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import Optimizer

import lightning_zero
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.whole import whole_params
from tests.engine.support import Model, Sharded, Twin, assert_same, language_loss, sgd, tokens
from tests.engine.test_offload import offload
from tests.harness import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")


def halves_the_rate(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@on_ranks(2)
@pytest.mark.parametrize(("row", "stage"), [("none", 3), ("optimizer_cpu", 1), ("cpu", 3), ("nvme", 3), ("auto", 3)])
def test_a_hook_before_the_step_sets_its_learning_rate(row: str, stage: int, tmp_path: Path) -> None:
    """In the step of every bucket, also of one that is stepped later."""
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, optimizer=sgd, each=stage >= 2)
    with Sharded(module, stage=stage, optimizer=sgd, **offload(row, tmp_path)) as side:
        for both in (twin, side):
            both.optimizer.register_step_pre_hook(halves_the_rate)
        for step in range(3):
            twin.backward(language_loss(twin.module, tokens(step)))
            twin.step()
            twin.zero_grad()
            side.zero_grad()
            side.backward(language_loss(side.module, tokens(step)))
            side.step()
            assert_same(side, twin, what=f"step {step}: ")


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gather_that_fails_on_its_way_in_leaves_nothing_behind(stage: int) -> None:
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, each=stage >= 2)
    full_master, calls = Bucket.full_master, 0

    def second_fails(self: Bucket) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError
        return full_master(self)

    with Sharded(module, stage=stage) as side:
        with (
            mock.patch.object(Bucket, "full_master", second_fails),
            pytest.raises(ZeroDivisionError),
            lightning_zero.gather(module),
        ):
            raise AssertionError("it has not got here")
        assert calls == 2 and not whole_params.gathered_buckets(side.engine)
        for both in (twin, side):
            both.backward(language_loss(both.module, tokens(0)))
            both.step()
        assert_same(side, twin)
