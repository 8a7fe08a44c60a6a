"""A group of one rank that gathers and reduces: the way on which a transport is tried on one GPU."""

from __future__ import annotations

import os

import pytest
import torch

from tests.engine.support import Model, Sharded, Twin, assert_same, language_loss, tokens
from tests.harness import on_ranks


@on_ranks(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_messages_are_sent_and_the_numbers_are_the_same(stage: int, precision: str) -> None:
    torch.manual_seed(3)
    os.environ["LIGHTNING_ZERO_EVEN_ALONE"] = "1"
    module = Model()
    twin = Twin(module, precision=precision, each=stage >= 2)
    with Sharded(module, stage=stage, precision=precision) as side:
        side.engine.comm.counts.clear()
        for step in range(2):
            for both in (twin, side):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
                    loss = language_loss(both.module, tokens(step))
                both.backward(loss)
                both.step()
            assert_same(side, twin)
            twin.zero_grad()
            side.zero_grad()
        kinds = {kind for kind, _ in side.engine.comm.counts}
        assert ("all_gather" in kinds) == (stage > 0)
        assert ("reduce_scatter" if stage else "all_reduce") in kinds
