"""Sharded training equals a plain replicated twin: parameters, gradients and losses, at every step.

The twin averages as ``docs/architecture.md`` says (in rank order; per backward or per step), so fp32 *and* bf16 are
compared to the bit, for all stages. Equality of the stages among themselves follows; what the twin cannot show is
compared directly.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import namedtuple
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import lightning_zero
from lightning_zero.comm import transports
from tests.engine.sides import DEVICE, Sharded, sgd
from tests.engine.support import ALL_STAGES, PRECISIONS, assert_equal, check, in_pairs
from tests.engine.test_hierarchy import accumulated, history
from tests.engine.test_offload import OPTIMIZERS
from tests.engine.works import loss_at, train
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


def _check_case(case: Case) -> None:
    settings = {name: getattr(case, name) for name in ("stage", "precision", "prefetch_bytes")}
    check(Model, accumulated(case.micro_batches), optimizer=OPTIMIZERS[case.optimizer], **settings)


@in_pairs(MATRIX)
def test_training_equals_the_twin(case: Case) -> None:
    run(case.world, _check_case, case)


@pytest.mark.smoke
@on_ranks(2, full=(1, 3))
@pytest.mark.parametrize("precision", VALUES["precision"])
@pytest.mark.mainly(lambda precision: precision == "fp32")
def test_a_plain_backward_is_enough_at_every_stage(precision: str) -> None:
    check(Model, accumulated(2), stage=ALL_STAGES, precision=precision, plain=True, steps=3)


# -- settings that only move things in time or place ------------------------------------------------------------------


def _history(stage: int, **config: Any) -> list[Any]:
    """Of a few clipped steps. (Adam would blow differences of 1e-9 up.)"""
    torch.manual_seed(3)
    with Sharded(Model(), stage=stage, optimizer=sgd, **config) as side:
        return history(side, accumulated(), clip=True)


@pytest.mark.sample
@on_ranks(2, full=(3,))
@PRECISIONS
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
        direct = _history(stage)
        with mock.patch.object(transports, "DIRECT_MAX_RANKS", 0):
            assert_equal(direct, _history(stage), tolerance=tolerance)


@on_ranks(1)
def test_a_bucket_holds_reduce_bucket_bytes_at_most() -> None:
    with Sharded(Model(), stage=3, reduce_bucket_bytes=2048) as side:
        sizes = [[4 * info.numel for info in bucket.params] for bucket in side.engine.buckets]
    assert max(sum(each) for each in sizes if len(each) > 1) <= 2048
    assert max(map(len, sizes)) > 2, "small parameters lie together"


# -- a second oracle: torch's own fully_shard -------------------------------------------------------------------------


STEPS = 4
TOLERANCES = {(2, "fp32"): 0.0, (2, "bf16"): 0.0, (3, "fp32"): 1e-6, (3, "bf16"): 1e-3}


def apply_fsdp2(module: Model, precision: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fp32 = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**{**fp32, "param_dtype": torch.bfloat16} if precision == "bf16" else {})
    # As ours: fp32 norm weights with inputs as they come. (On a cast input torch's kernel rounds otherwise.)
    keep = MixedPrecisionPolicy(**fp32, output_dtype=policy.param_dtype, cast_forward_inputs=False)
    for inner in module.modules():
        if isinstance(inner, nn.LayerNorm):
            fully_shard(inner, mesh=mesh, mp_policy=keep)
    for block in (*module.blocks, module):
        fully_shard(block, mesh=mesh, mp_policy=policy)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fsdp2_history(module: Model, precision: str) -> list[Tensor]:
    apply_fsdp2(module, precision)
    optimizer, found = plain_sgd(module.parameters()), []
    for step in range(STEPS):
        found.append(loss_at(module, step))
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]


@pytest.mark.skipif(DEVICE != "cpu", reason="the mesh of fully_shard is of CPUs")
@pytest.mark.sample
@on_ranks(2, 3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_and_parameters_equal_those_of_fsdp2(precision: str) -> None:
    torch.manual_seed(3)
    module = Model()
    tolerance = TOLERANCES[dist.get_world_size(), precision]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        expected = fsdp2_history(copy.deepcopy(module), precision)
    for stage in (0, 3):
        with Sharded(copy.deepcopy(module), stage=stage, precision=precision, optimizer=plain_sgd) as side:
            found = train(side, range(STEPS))
            with lightning_zero.gather(side.module):
                found += side.module.parameters()
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
