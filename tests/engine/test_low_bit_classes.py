"""Optimizers of bitsandbytes whose state is in 8 bits step whole tensors, and those of torchao are refused."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import lightning_zero
from lightning_zero.settings import ConfigError
from tests.engine.sides import load_state, state_of, with_twin
from tests.engine.support import assert_equal, assert_same
from tests.engine.test_offload import offload
from tests.engine.works import train_both
from tests.harness import on_ranks
from tests.models import Model

NESTED = "__bnb_optimizer_quant_state__"


def packed(params: Any) -> torch.optim.Optimizer:
    import bitsandbytes as bnb

    return bnb.optim.AdamW8bit(params, lr=0.01, weight_decay=0.1)  # type: ignore[no-any-return]


def model() -> nn.Module:
    return Model(width=64)  # a tensor of fewer than 4,096 elements keeps its state in fp32


@pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs it")
@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("stage", "row"), [(0, "none"), (1, "none"), (2, "optimizer_cpu"), (3, "none"), (3, "nvme")])
def test_packed_state_is_stepped_saved_and_loaded_as_in_one_process(stage: int, row: str, tmp_path: Any) -> None:
    with with_twin(model, stage=stage, optimizer=packed, shaped=True, **offload(row, tmp_path)) as (side, twin):
        train_both((side, twin), range(2))
        state, plain = state_of(side), twin.optimizer.state_dict()
        assert any(entry["state1"].dtype is torch.uint8 for entry in state["state"].values())
        assert_equal(state["state"], {n: e | e.pop(NESTED) for n, e in plain["state"].items()})
        weights = side.engine.state_dict(only_rank_0=False)
        for saved in (state, twin.optimizer.state_dict()):  # ours, and bitsandbytes' own
            train_both((side,), range(2, 3))  # something else, which is to be forgotten
            side.engine.load_state_dict(weights)
            load_state(side, copy.deepcopy(saved))
        train_both((side, twin), range(2, 4))
        assert_same(side, twin)


@pytest.mark.skipif(not find_spec("torchao"), reason="needs it")
@on_ranks(1)
def test_packed_state_in_tensors_that_wrap_others_is_refused() -> None:
    from torchao.optim import AdamW8bit

    for stage in (0, 1):
        module = nn.Linear(64, 64)
        engine = lightning_zero.shard(module, stage=stage, device="cpu")
        with pytest.raises(
            ConfigError, match=r"got a OptimState8bit, 'exp_avg' of torchao.*bitsandbytes.optim.AdamW8bit"
        ):
            engine.add_optimizer(AdamW8bit(module.parameters()))
        engine.release()
