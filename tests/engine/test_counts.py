"""The logical collectives of a step are those of the table of stages, and nothing rests where it should not."""

from __future__ import annotations

import os
from collections import Counter
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from benchmarks.bench_scale import expected_counts
from tests.engine.sides import Sharded, Side
from tests.engine.support import STAGES, check
from tests.engine.test_hierarchy import accumulated
from tests.engine.works import accumulate, loss_at, tokens, train
from tests.harness import on_ranks
from tests.models import Model

pytestmark = pytest.mark.sample  # the full tier has all cases


def step_counts(side: Sharded, step: int, micro_batches: int = 1) -> Counter[tuple[str, str]]:
    """Operations of one whole step, up to the gathers that the next forward waits for."""
    side.engine.passes.wait_for_all()
    side.engine.comm.counts.clear()
    train(side, [step], accumulated(micro_batches))
    return side.engine.comm.counts.copy()


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_collectives_of_a_step_are_those_of_the_table(stage: int, k: int, precision: str) -> None:
    for plain in (False, True):
        with Sharded(Model(), stage=stage, precision=precision, plain=plain) as side:
            step_counts(side, 0, k)  # recorded
            for step in (1, 2):
                assert step_counts(side, step, k) == expected_counts(side.engine, k)


@on_ranks(2)
def test_units_that_stay_gathered_are_gathered_once_and_plans_are_few() -> None:
    nbytes = 8192  # of a block, on 2 ranks
    with Sharded(Model(depth=4), keep_gathered_bytes=2 * nbytes) as side:
        assert side.engine.units[1].gathered_nbytes == nbytes
        _, counts = step_counts(side, 0), step_counts(side, 1)
        gathers = {unit.name: counts["all_gather", unit.buckets[0].label] for unit in side.engine.units}
        assert gathers == {"": 1, "blocks.0": 2, "blocks.1": 1, "blocks.2": 1, "blocks.3": 1}
        for _ in range(20):  # passes of a loop without steps
            loss_at(side.module, 0).backward()
        assert len(side.engine.passes.order.plans) < 20


@on_ranks(2)
def test_a_bucket_that_one_rank_completes_late_does_not_hold_up_the_others() -> None:
    """Rank 1 does not use the last block, the first of the backward. From the second step on it comes last for both."""
    early: list[int] = []

    def work(side: Sharded, step: int) -> None:
        side.engine.comm.counts.clear()
        with side.engine.step_scope():
            x = side.module.embed(tokens(step))
            for block in side.module.blocks[: 3 - dist.get_rank()]:
                x = block(x)
        side.backward(x.square().mean())

    with Sharded(Model()) as side:
        reducer, counts = side.engine.passes.reducer, side.engine.comm.counts
        flush = reducer.flush

        def count_then_flush() -> None:
            early.append(sum(n for (kind, _), n in counts.items() if kind == "reduce_scatter"))
            flush()

        with mock.patch.object(reducer, "flush", count_then_flush):
            train(side, range(3), work)
    assert early[1:] == [3 - dist.get_rank()] * 2


@on_ranks(1)
@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_that_sends_messages_to_itself_has_the_same_numbers(stage: int, precision: str) -> None:
    """The way on which a transport is tried on one GPU."""
    os.environ["LIGHTNING_ZERO_EVEN_ALONE"] = "1"
    kinds: set[str] = set()

    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded):
            kinds.update(kind for kind, _ in side.engine.comm.counts)
            side.engine.comm.counts.clear()
        return accumulate(side, step, 1)

    check(Model, work, stage=stage, precision=precision, steps=3)
    assert ("all_gather" in kinds) == (stage > 0)
    assert ("reduce_scatter" if stage else "all_reduce") in kinds
