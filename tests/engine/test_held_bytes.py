"""The plan of the memory is what an engine holds: every stage, offload row and precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_zero
from lightning_zero.engine.units.describe import bucket_shapes, describe_units
from lightning_zero.planning.buckets import place
from lightning_zero.planning.memory import RING_COUNT, RING_NBYTES, Moment, planned_bytes
from lightning_zero.planning.placement import OFFLOADS, STAGES, Tier
from lightning_zero.settings import Offload, Precision, allowed_rows, make_config
from lightning_zero.trainer.memory.held_bytes import held_bytes, plan_of, state_tensors
from tests import rows
from tests.engine.sides import Sharded, step_and_clear
from tests.engine.support import PRECISIONS
from tests.engine.test_offload import offload
from tests.engine.works import autocast, loss_at
from tests.harness import on_ranks, run_command
from tests.models import VOCABULARY, Odd

ROWS = [(stage.value, offload.value) for stage, offload in allowed_rows() if offload is not Offload.auto]


@on_ranks(2, full=(1,))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "row"), ROWS)
def test_the_plan_is_what_is_held(stage: str, row: str, precision: str, tmp_path: Path) -> None:
    with Sharded(Odd(), stage=stage, **offload(row, tmp_path), precision=precision) as side:
        engine = side.engine

        def check(moment: Moment) -> None:
            engine.passes.wait_for_all()
            held = held_bytes(engine)
            assert held == planned_bytes(plan_of(engine), engine.comm.rank, state_tensors=states, moment=moment), moment

        states = 0
        check(Moment.cleared)
        for step in range(2):
            with autocast(precision):
                side.backward(loss_at(side.module, step))
            check(Moment.reduced)
            step_and_clear(side)
            states = 2
            engine.passes.wait_for_all()
            engine.passes.sharded_grads.finish_pending()
            check(Moment.cleared)
        assert state_tensors(engine) == 2
        tiers = {tier for (_, tier), nbytes in held_bytes(engine).items() if nbytes}
        assert (Tier.nvme in tiers) == ("nvme" in row)


@on_ranks(2)
@PRECISIONS
def test_a_module_on_meta_is_planned_as_it_is_sharded(precision: str) -> None:
    with torch.device("meta"):
        shapes = bucket_shapes(describe_units(Odd(), make_config(), Precision[precision]))
    for stage in STAGES:
        with Sharded(Odd(), stage=stage.value, precision=precision) as side:
            tiers = OFFLOADS[Offload.none]
            assert plan_of(side.engine) == [place(s, STAGES[stage], tiers, dist.get_world_size()) for s in shapes]


# -- an engine on the meta device: layouts, order and bytes of a model without its values ----------------------------


@on_ranks(1)
@pytest.mark.parametrize("built_on", ["meta", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_whole_steps_without_values(stage: int, precision: str, built_on: str) -> None:
    with torch.device(built_on):
        model = Odd()
    engine = lightning_zero.shard(model, stage=stage, precision=precision, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    engine.add_optimizer(optimizer)
    for _ in range(2):
        logits = model(torch.zeros(2, 7, dtype=torch.long, device="meta"))
        assert logits.shape == (2, 7, VOCABULARY)
        logits.sum().backward()
        engine.passes.wait_for_all()
        lightning_zero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        assert held_bytes(engine) == planned_bytes(plan_of(engine), moment=Moment.reduced)
        optimizer.zero_grad()
    with pytest.raises(NotImplementedError, match="no data"):
        engine.state_dict()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    engine.release()
    assert all(type(p) is nn.Parameter and p.is_meta for p in model.parameters())


# -- what the system says a process holds: a wide model with a tiny batch ---------------------------------------------

SCRIPT = """
import gc, json, sys
import psutil, torch
from torch import nn
import lightning_zero
from lightning_zero.trainer.memory.held_bytes import limits_of, plan_of
from lightning_zero.planning import memory

torch.set_num_threads(1)
row, precision, folder = sys.argv[1:]
offload = {"name": row, "nvme_path": folder} if "nvme" in row else row
warm = nn.Linear(8, 8)  # what torch allocates for itself at the first use
warm(torch.ones(1, 8)).sum().backward()
torch.optim.AdamW(warm.parameters(), fused=True).step()
process = psutil.Process()
before = process.memory_info().rss
with torch.device("meta"):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.Identity()) for _ in range(16)))
settings = dict(unit={"classes": ["Sequential"]}, prefetch_bytes=1, reduce_bucket_bytes=1 << 24)
engine = lightning_zero.shard(model, stage=3, precision=precision, offload=offload, device="cpu", **settings)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
engine.add_optimizer(optimizer)
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        loss = model(torch.ones(1, 2048)).float().square().mean()
    engine.passes.backward(loss)
    optimizer.step()
    engine.passes.wait_for_all()
    optimizer.zero_grad()
    engine.passes.sharded_grads.finish_pending()
gc.collect()
rest = memory.planned_bytes(plan_of(engine), moment=memory.Moment.cleared)
planned = sum(n for (role, tier), n in rest.items() if tier is not memory.Tier.nvme)
print(json.dumps({"measured": process.memory_info().rss - before, "planned": planned,
                  "parameters": sum(p.numel() for p in model.parameters())}))
engine.release()
"""


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("row", rows.ROWS)
def test_resident_memory_is_what_was_planned(row: str, precision: str, tmp_path: Path) -> None:
    # Freed blocks of this size go back to the system at once; by default glibc learns to keep them.
    words = ["python", "-W", "ignore", "-c", SCRIPT, row, precision, tmp_path]
    done = run_command(*words, MALLOC_MMAP_THRESHOLD_=1 << 20)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # 24 MiB for threads, kernels' scratch and what an allocator keeps: a tenth of the smallest row is not more.
    slack = max(0.1 * found["planned"], 24 << 20)
    # The ring is planned whole; buffers of it that were never needed have no memory.
    unused = RING_COUNT * RING_NBYTES if "nvme" in row else 0
    assert found["planned"] - unused - slack <= found["measured"] <= found["planned"] + slack, found
    if row == "cpu" and precision == "bf16":
        # 4 of the master, 8 of the state, and 4 of the gradient, whose memory stays reserved
        assert found["planned"] <= 16.1 * found["parameters"]
