"""The scale of the loss follows ``torch.amp.GradScaler``."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.optimizers.loss_scale import LossScaler
from tests.harness import on_ranks


@on_ranks(1)
@pytest.mark.parametrize("first", [2.0**16, 2.0**126])
def test_scales_are_those_of_torch_up_to_the_largest(first: float) -> None:
    """A scale that fp32 cannot hold would make every loss infinite, and skip a step."""
    ours = LossScaler(first, growth_interval=2)
    theirs = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=2)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param])
    for step in range(8):
        overflowed = first < 2.0**100 and step == 5
        param.grad = theirs.scale(torch.full((1,), float("inf") if overflowed else 0.0))
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflowed=overflowed)
        assert ours.scale == theirs.get_scale(), step
        assert ours.state_dict()["_growth_tracker"] == theirs.state_dict()["_growth_tracker"], step
