"""Ranks of which one is slower, or owns less, issue the same collectives in the same order."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_zero
from lightning_zero.engine.units.after_step import StepJob, StepWorker
from lightning_zero.ranks.waits import StallError
from tests.engine.support import Model, Sharded, Side, Twin, assert_same, check, floats, language_work, sgd, tokens
from tests.engine.test_offload import offload
from tests.harness import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")


def slow_on_rank(rank: int, seconds: float = 0.02) -> Any:
    """The worker of one rank takes its time."""

    def late(job: StepJob) -> StepJob:
        def run() -> None:
            time.sleep(seconds if dist.get_rank() == rank else 0.0)
            job.run()

        return job._replace(run=run)

    submit = StepWorker.submit
    return mock.patch.object(
        StepWorker, "submit", lambda self, jobs, *event: submit(self, list(map(late, jobs)), *event)
    )


class Stumbles(Model):
    stumble = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.stumble:
            raise ZeroDivisionError
        return super().forward(batch)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])
def test_a_forward_that_raises_while_the_worker_of_one_rank_is_behind(
    stage: int, slow: int, plain: bool, tmp_path: Path
) -> None:
    """How many parameters a rank has brought up to date so far must not decide what it issues next."""
    torch.manual_seed(3)
    module = Stumbles()
    twin = Twin(module, each=stage >= 2)
    with Sharded(module, stage=stage, plain=plain, stall_timeout_s=15, **offload("optimizer_cpu", tmp_path)) as sharded:
        for step in range(4):
            with slow_on_rank(slow):
                for side in (sharded, twin):
                    language_work(side, step)
                    side.step()
                    side.zero_grad()
            time.sleep(0.03)  # the worker of the other rank is done, that of this one is not
            module.stumble = True
            with pytest.raises(ZeroDivisionError):
                module(tokens(step))
            module.stumble = False
        assert_same(sharded, twin)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("waits_in", ["an agreement", "a call of another's"])
def test_a_parameter_that_one_rank_reads_while_the_other_waits_for_it(
    stage: int, slow: int, waits_in: str, tmp_path: Path
) -> None:
    """The gathers that bring it up to date need both ranks, of which one waits already."""
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, each=stage >= 2)
    with Sharded(module, stage=stage, stall_timeout_s=15, **offload("optimizer_cpu", tmp_path)) as sharded:
        for step in range(3):
            with slow_on_rank(slow, 0.1):
                for side in (sharded, twin):
                    language_work(side, step)
                    side.step()
                    side.zero_grad()
            if dist.get_rank() == 0:
                last = [list(m.parameters())[-1].detach().clone() for m in (sharded.module, twin.module)]
                torch.testing.assert_close(*last)
            comm = sharded.engine.comm
            with torch.inference_mode():  # as between the batches of a validation
                if waits_in == "an agreement":
                    comm.max_(torch.ones(1))
                else:
                    with comm.waits.elsewhere("a reduction"):
                        dist.all_reduce(torch.ones(1))
        assert_same(sharded, twin)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("slow", [0, 1])
def test_values_assigned_while_the_worker_of_one_rank_is_behind(stage: int, slow: int, tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, each=stage >= 2)
    with Sharded(module, stage=stage, stall_timeout_s=15, **offload("optimizer_cpu", tmp_path)) as sharded:
        for step in range(3):
            with slow_on_rank(slow, 0.1):
                for side in (sharded, twin):
                    language_work(side, step)
                    side.step()
            generator = torch.Generator().manual_seed(step)
            for own, (other, master) in zip(module.parameters(), twin.masters.items(), strict=True):
                own.data = value = torch.randn(own.shape, generator=generator)
                other.data.copy_(value)
                master.value.data.copy_(value)
            lightning_zero.grad_norm(module)
            for side in (sharded, twin):
                side.zero_grad()
        assert_same(sharded, twin)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_in_a_scope_goes_on_behind_the_next_scope(stage: int, tmp_path: Path) -> None:
    """As in manual optimization."""
    may_step = threading.Event()  # until then the last unit waits, however late the main thread comes
    with Sharded(Model(), stage=stage, **offload("optimizer_cpu", tmp_path)) as side:
        last = side.engine.units[-1]

        def late(job: StepJob) -> StepJob:
            return job._replace(run=lambda: (job.bucket not in last.buckets or may_step.wait(60)) and job.run())

        submit = StepWorker.submit
        with mock.patch.object(
            StepWorker, "submit", lambda self, jobs, *event: submit(self, list(map(late, jobs)), *event)
        ):
            for step in range(3):
                with side.engine.step_scope():
                    if step:
                        assert not last.step_done
                    may_step.set()
                    language_work(side, step)
                    may_step.clear()
                    side.step()
                    side.zero_grad()
            may_step.set()


@on_ranks(2)
def test_a_read_on_one_rank_says_that_it_takes_all(tmp_path: Path) -> None:
    side = Sharded(Model(), stage=1, stall_timeout_s=1.5, **offload("optimizer_cpu", tmp_path))
    language_work(side, 0)
    with slow_on_rank(1, 2.0):  # which would come to it by itself
        side.step()
    if dist.get_rank() == 0:
        with pytest.raises(StallError):
            side.module.head.weight.sum()
        assert side.engine.comm.waits.place == "a read of head.weight between steps, which takes all ranks"
    else:
        time.sleep(2.5)
    side.engine.comm.waits.close()  # messages were lost: there is no release


class Late(nn.Module):
    """Blocks that are smaller than a shard; the second is used from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if i != 1 or self.step > 1:
                x = x + block(x).tanh()
        return x


@on_ranks(2, 3)
@pytest.mark.parametrize("row", ["optimizer_cpu", "cpu"])
def test_a_rank_that_owns_nothing_of_a_unit_waits_for_its_step_as_the_others_do(row: str, tmp_path: Path) -> None:
    def work(side: Side, step: int) -> torch.Tensor:
        side.module.step = step
        loss = side.module(floats(step, 2, 3)).square().mean()
        side.backward(loss)
        return loss

    settings = {"unit": {"classes": ["Linear"]}, "stall_timeout_s": 15, **offload(row, tmp_path)}
    torch.manual_seed(3)
    module = Late()
    twin = Twin(module, optimizer=sgd)
    with Sharded(module, optimizer=sgd, **settings) as sharded:
        for step in range(6):
            for side in (sharded, twin):
                work(side, step)
                side.step()
                side.zero_grad()
            with lightning_zero.gather(module):
                pass
        assert_same(sharded, twin)
    check(Late, work, steps=5, optimizer=sgd, **settings)
