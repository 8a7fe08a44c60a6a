"""Sharded training equals a plain replicated twin: parameters, gradients and losses, at every step.

The twin averages as ``docs/architecture.md`` says (in rank order; per backward or per step), so fp32 *and* bf16 are
compared to the bit, for all stages. Equality of the stages among themselves follows; what the twin cannot show is
compared directly.
"""

from __future__ import annotations

import functools
import itertools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_zero
from tests.engine.support import ALL_STAGES, Sharded, accumulate, assert_equal, autocast, check, in_pairs, sgd
from tests.engine.test_offload import OPTIMIZERS
from tests.harness import on_ranks, run
from tests.models import Model

VALUES: dict[str, Sequence[Any]] = {
    "world": (2, 3),
    "stage": (0, 1, 2, 3),
    "micro_batches": (1, 2, 3),
    "precision": ("fp32", "bf16", "bf16_true"),
    "prefetch_bytes": (0, 256 * 1024**2),
    "optimizer": ("sgd", "adamw"),
}
Case = namedtuple("Case", VALUES)
MATRIX = [Case(*values) for values in itertools.product(*VALUES.values())]


def _check_case(case: Case, **config: Any) -> None:
    check(
        Model,
        functools.partial(accumulate, micro_batches=case.micro_batches),
        stage=case.stage,
        precision=case.precision,
        optimizer=OPTIMIZERS[case.optimizer],
        prefetch_bytes=case.prefetch_bytes,
        **config,
    )


@in_pairs(MATRIX)
def test_training_equals_the_twin(case: Case) -> None:
    run(case.world, _check_case, case)


@pytest.mark.smoke
@on_ranks(2, full=(1, 3))
@pytest.mark.parametrize("precision", VALUES["precision"])
@pytest.mark.mainly(lambda precision: precision == "fp32")
def test_a_plain_backward_is_enough_at_every_stage(precision: str) -> None:
    work = functools.partial(accumulate, micro_batches=2)
    check(Model, work, stage=ALL_STAGES, precision=precision, plain=True, steps=3)


# -- settings that only move things in time or place ------------------------------------------------------------------


def _history(stage: int, *, micro_batches: int = 1, precision: str = "fp32", **config: Any) -> list[Tensor]:
    """Losses, norms and final parameters of a few clipped steps. (Adam would blow differences of 1e-9 up.)"""
    torch.manual_seed(3)
    found: list[Tensor] = []
    with Sharded(Model(), stage=stage, precision=precision, optimizer=sgd, **config) as side:
        for step in range(3):
            with autocast(precision):
                found.append(accumulate(side, step, micro_batches))
            found.append(side.clip(0.3))
            side.step()
            side.zero_grad()
        with lightning_zero.gather(side.module):
            found += [p.detach().clone() for p in side.module.parameters()]
    return found


@pytest.mark.sample
@on_ranks(2, full=(3,))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
def test_stages_agree_to_the_bit_with_clipping(precision: str) -> None:
    first = _history(0, precision=precision)
    for stage in (1, 2, 3):
        assert_equal(first, _history(stage, precision=precision))


@on_ranks(2, full=(3,))
def test_settings_of_time_and_memory_change_nothing() -> None:
    plain = _history(3)
    for config in (
        {"prefetch_bytes": 0},
        {"prefetch_bytes": 10_000},  # a block has 8 KiB
        {"keep_gathered_bytes": 10_000},
        {"keep_gathered_bytes": 10**9, "prefetch_bytes": 0},
        {"dynamic_graph": True},
    ):
        assert_equal(plain, _history(3, **config))


@on_ranks(2, full=(3,))
def test_transports_agree() -> None:
    tolerance = 0.0 if dist.get_world_size() == 2 else 1e-6
    for stage in (0, 3):
        direct = _history(stage, comm={"transport": "direct"})
        assert_equal(direct, _history(stage, comm={"transport": "plain"}), tolerance=tolerance)


def test_a_bucket_holds_reduce_bucket_bytes_at_most() -> None:
    with Sharded(Model(), stage=3, reduce_bucket_bytes=2048) as side:
        sizes = [[4 * info.numel for info in bucket.params] for bucket in side.engine.buckets]
    assert max(sum(each) for each in sizes if len(each) > 1) <= 2048
    assert max(map(len, sizes)) > 2, "small parameters lie together"
