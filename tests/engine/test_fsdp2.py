"""A second oracle: torch's own ``fully_shard`` trains to the same numbers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import lightning_zero
from tests.engine.support import Model, Sharded, language_loss, tokens, train
from tests.harness import on_ranks

STEPS = 4


TOLERANCES = {(2, "fp32"): 0.0, (2, "bf16"): 0.0, (3, "fp32"): 1e-6, (3, "bf16"): 1e-3}


def apply_fsdp2(module: Model, precision: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # As ours: fp32 norm weights with inputs as they come. (On a cast input torch's kernel rounds otherwise.)
    keep = MixedPrecisionPolicy(
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        output_dtype=policy.param_dtype,
        cast_forward_inputs=False,
    )
    for inner in module.modules():
        if isinstance(inner, nn.LayerNorm):
            fully_shard(inner, mesh=mesh, mp_policy=keep)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def full(param: Tensor) -> Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fsdp2_history(module: Model, precision: str) -> list[Tensor]:
    apply_fsdp2(module, precision)
    optimizer, found = sgd(module.parameters()), []
    for step in range(STEPS):
        found.append(language_loss(module, tokens(step)))
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return found + [full(p) for p in module.parameters()]


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
        with Sharded(copy.deepcopy(module), stage=stage, precision=precision, optimizer=sgd) as side:
            found = train(side, range(STEPS))
            with lightning_zero.gather(side.module):
                torch.testing.assert_close(
                    [*found, *side.module.parameters()], expected, rtol=tolerance, atol=tolerance
                )
