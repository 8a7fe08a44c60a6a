"""The plan of the memory is what an engine holds: every stage, offload row and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.config import Offload, Precision, allowed_rows, make_config
from lightning_zero.engine.units.describe import bucket_shapes, describe_units
from lightning_zero.planning.buckets import place
from lightning_zero.planning.memory import Moment, planned_bytes
from lightning_zero.planning.placement import OFFLOADS, STAGES, Tier
from lightning_zero.trainer.memory.held_bytes import held_bytes, plan_of, state_tensors
from tests.engine.support import Sharded, autocast, language_loss, tokens
from tests.harness import on_ranks
from tests.models import Odd

ROWS = [(stage.value, offload.value) for stage, offload in allowed_rows() if offload is not Offload.auto]


def settings(offload: str, folder: Path) -> dict[str, Any]:
    return {"name": offload, "nvme_path": str(folder)} if "nvme" in offload else {"name": offload}


@on_ranks(2, full=(1,))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "offload"), ROWS)
def test_the_plan_is_what_is_held(stage: str, offload: str, precision: str, tmp_path: Path) -> None:
    with Sharded(Odd(), stage=stage, offload=settings(offload, tmp_path), precision=precision) as side:
        engine = side.engine

        def check(moment: Moment) -> None:
            engine.passes.wait_for_all()
            held = held_bytes(engine)
            assert held == planned_bytes(plan_of(engine), engine.comm.rank, state_tensors=states, moment=moment), moment

        states = 0
        check(Moment.cleared)
        for step in range(2):
            with autocast(precision):
                side.backward(language_loss(side.module, tokens(step)))
            check(Moment.reduced)
            side.step()
            side.zero_grad()
            states = 2
            engine.passes.wait_for_all()
            engine.passes.sharded_grads.finish_pending()
            check(Moment.cleared)
        assert state_tensors(engine) == 2
        tiers = {tier for (_, tier), nbytes in held_bytes(engine).items() if nbytes}
        assert (Tier.nvme in tiers) == ("nvme" in offload)


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
def test_a_module_on_meta_is_planned_as_it_is_sharded(precision: str) -> None:
    with torch.device("meta"):
        shapes = bucket_shapes(describe_units(Odd(), make_config(), Precision[precision]))
    for stage in STAGES:
        with Sharded(Odd(), stage=stage.value, precision=precision) as side:
            tiers = OFFLOADS[Offload.none]
            assert plan_of(side.engine) == [place(s, STAGES[stage], tiers, dist.get_world_size()) for s in shapes]
