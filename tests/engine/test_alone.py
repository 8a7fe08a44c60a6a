"""A call that takes all ranks, made by one: named in seconds, on all of them, however long stalls are allowed to be."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.comm import one_sided
from lightning_zero.comm.agreements import ApartError
from lightning_zero.ranks import waits
from lightning_zero.ranks.verdict import StallError
from tests.engine.sides import Sharded
from tests.engine.support import places_posted_often
from tests.engine.works import language_work
from tests.harness import Pool
from tests.models import Model
from tests.trainer.toys import Lit, fit, seeded


def in_a_pool(function: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    pool = Pool(ranks)  # of its own: messages are left over
    try:
        return pool.run(pickle.dumps((function, args, {})), timeout=60.0)
    finally:
        pool.kill()


SAID = {  # of rank 0
    "gather": "between passes, waits for 'gather(), which all ranks must enter'",
    "norm": "a read of .grad.norm(), which takes all ranks, waits for 'the norms of gradients, of type 2'",
    "write": "the end of writes to head.weight between steps, waits for 'writes to parameters between steps, which all",
    "use": "'mul' of head.weight between steps, waits for \"'mul' of head.weight in unit",
    "read": "a read of .grad, which takes all ranks, waits for 'a read of the gradient of head.weight, which all ranks",
}


@contextlib.contextmanager
def asked_soon(later: float = 0.0) -> Iterator[None]:
    soon = mock.patch.multiple(one_sided, PATIENCE_S=0.3, LISTEN_S=0.05)
    with places_posted_often(), soon, mock.patch.object(waits, "ASK_S", 0.5 + later * dist.get_rank()):
        yield


KEPT: list[Sharded] = []  # whose watchdogs go on to post what their rank does


def alone(what: str, stage: int, later: float = 0.0) -> str:
    with asked_soon(later):
        side = Sharded(Model(), stage=stage, stall_timeout_s=3600.0)
        KEPT.append(side)
        language_work(side, 0)
        side.step()
        side.engine.passes.between.begin_run()
        if what == "use":  # between a backward and its step
            language_work(side, 1)
        calls: dict[str, Callable[[], Any]] = {
            "gather": lambda: lightning_zero.gather(side.module).__enter__(),
            "norm": lambda: side.module.head.weight.grad.norm(),
            "write": lambda: (side.module.head.weight.data.mul_(2), side.step()),
            "use": lambda: side.module.head.weight * 2,
            "read": lambda: side.module.head.weight.grad.abs(),
        }
        with pytest.raises(StallError, match=r"All ranks must call this, or none") as caught:
            if dist.get_rank():
                side.engine.comm.max_(torch.zeros(1))
            else:
                calls[what]()
    return str(caught.value)


@pytest.mark.parametrize(("what", "stage"), [("gather", 1), *((what, 3) for what in SAID)])
def test_what_one_rank_does_alone_is_named_on_all(what: str, stage: int) -> None:
    for said in in_a_pool(alone, what, stage):
        assert f"rank 0: {SAID[what]}" in said
        assert "rank 1: between passes, waits for 'a small reduction'" in said


def test_a_rank_that_asks_when_the_other_has_raised_is_told() -> None:
    assert len({said.partition(", and some rank")[2] for said in in_a_pool(alone, "gather", 3, 6.0)}) == 1


class Saves(Lit):
    """Rank 0 saves alone, in the middle of a fit."""

    folder: str

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and self.global_rank == 0:
            self.trainer.save_checkpoint(Path(self.folder) / "saved.ckpt")


def save_alone(stage: str, folder: str) -> str:
    module = seeded(Saves)
    module.folder = folder
    with asked_soon(), pytest.raises((StallError, ApartError)) as caught:
        fit(ZeroStrategy(stage, stall_timeout_s=3600.0), folder, module, limit_val_batches=0)
    return str(caught.value)


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_a_save_by_one_rank_alone_is_named_on_all(stage: str, tmp_path: Path) -> None:
    for said in in_a_pool(save_alone, stage, str(tmp_path)):
        assert "waits for 'saving a checkpoint: who sees it'" in said and "ll ranks must" in said
        assert "rank 1: " in said


def stepped(stage: int) -> Sharded:
    side = Sharded(Model(), stage=stage)
    KEPT.append(side)
    side.engine.passes.between.begin_run()
    language_work(side, 0)
    side.step()
    return side


def read_before_and_after_another_steps_again(stage: int) -> tuple[str, float, float]:
    with asked_soon():
        side, rank, said = stepped(stage), dist.get_rank(), ""
        if rank == 1:
            side.step()  # with the same gradients, and without a message
        if rank == 0:
            with pytest.raises(RuntimeError) as caught:
                _ = side.module.head.weight * 2
            said = str(caught.value)
        if rank != 1:
            side.step()
        alone = side.module.head.weight.norm().item() if rank == 0 else 0.0
        with lightning_zero.gather(side.module):
            return said, alone, side.module.head.weight.norm().item()


def test_values_of_two_steps_are_not_mixed() -> None:
    """Not in the next read either: one of the ranks had answered when another one refused."""
    said, alone, whole = in_a_pool(read_before_and_after_another_steps_again, 3, ranks=3)[0]
    assert "rank 1: code that only some ranks run reads parameters (embed.weight, ...), but this rank has cha" in said
    assert alone == pytest.approx(whole, rel=1e-7)
