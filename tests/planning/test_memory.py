"""Bytes by role: the formulas of the architecture, and that they add up over ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.config import Stage
from lightning_zero.planning.layout import lay_out
from lightning_zero.planning.memory import BucketPlan, Moment, Role, planned_bytes
from lightning_zero.planning.placement import STAGES, Placement, Tier

NUMELS = st.lists(st.integers(1, 5000), min_size=1, max_size=6)


def bucket(numels: list[int], ranks: int, stage: Stage, *, mixed: bool = True, trainable: bool = True) -> BucketPlan:
    """Mixed: bf16 compute and gradients, fp32 master; else all fp32."""
    compute, grad = (2, 2) if mixed else (4, 4)
    return BucketPlan(lay_out(numels, ranks), STAGES[stage], compute, 4, grad, not mixed, trainable)


def total(plan: BucketPlan, rank: int = 0, moment: Moment = Moment.reduced) -> int:
    return sum(planned_bytes([plan], rank, state_tensors=2, moment=moment).values())


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bytes_of_the_architectures_table(ranks: int) -> None:
    """Parameters that fill their shards: bf16 with fp32 master and Adam, gradients in bf16, while they accumulate."""
    p = 256 * ranks
    expected = {
        Stage.zero0: 16 * p,
        Stage.zero1: 4 * p + 12 * p // ranks,
        Stage.zero2: 2 * p + 14 * p // ranks,
        Stage.zero3: 14 * p // ranks if ranks > 1 else 16 * p,  # one rank keeps the gathered parameters
    }
    for stage, nbytes in expected.items():
        assert total(bucket([p], ranks, stage), moment=Moment.accumulating) == nbytes, stage


def test_fp32_holds_parameters_once() -> None:
    for stage, nbytes in {Stage.zero0: 4096 * 4, Stage.zero3: 4096}.items():
        plan = planned_bytes([bucket([1024], 4, stage, mixed=False)], 0, state_tensors=2)
        assert plan[Role.master_param, Tier.device] == 0
        assert sum(plan.values()) == nbytes


def test_moments() -> None:
    plan = bucket([4096], 4, Stage.zero1)
    grads = {m: planned_bytes([plan], 0, state_tensors=2, moment=m)[Role.grad, Tier.device] for m in Moment}
    assert grads == {Moment.accumulating: 2 * 4096, Moment.reduced: 2 * 1024, Moment.cleared: 0}


def test_a_frozen_bucket_has_parameters_only() -> None:
    for stage in Stage:
        plan = planned_bytes([bucket([4096], 4, stage, trainable=False)], 0, state_tensors=2)
        sharded = STAGES[stage].compute_param is Placement.sharded
        assert plan[Role.compute_param, Tier.device] == 2 * (1024 if sharded else 4096) == sum(plan.values())


@given(NUMELS, st.integers(1, 5), st.sampled_from(Stage), st.integers(0, 3))
def test_the_ranks_optimizer_states_cover_every_parameter(
    numels: list[int], ranks: int, stage: Stage, states: int
) -> None:
    plan = bucket(numels, ranks, stage)
    nbytes = [planned_bytes([plan], r, state_tensors=states)[Role.optim_state, Tier.device] for r in range(ranks)]
    once = nbytes[0] if plan.row.master is Placement.replicated else sum(nbytes)
    assert 4 * states * sum(numels) <= once <= 4 * states * plan.layout.numel


@given(NUMELS, st.integers(2, 5), st.booleans())
def test_a_later_stage_never_holds_more(numels: list[int], ranks: int, mixed: bool) -> None:
    totals = [total(bucket(numels, ranks, stage, mixed=mixed), moment=Moment.accumulating) for stage in Stage]
    assert totals == sorted(totals, reverse=True)
