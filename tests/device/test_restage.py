"""A restage on a device: its streams are in order, and what it moves leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.device.simulate import MIXED, Case, Found, Step, train_step

# Every kind of a bucket's rest comes after another kind.
ROWS = ["zero3 none", "zero1 optimizer_cpu", "zero0 none", "zero2 none", "zero3 cpu", "zero2 optimizer_nvme"]
ROWS += ["zero3 nvme"]


def walk(engine: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """From row to row and back to the first, with steps in between; once while a step is under way."""
    first = engine.config
    path = first.offload.nvme_path
    for row in ROWS:
        stage, name = row.split()
        if ("nvme" in name and path is None) or (stage == "zero0" and engine.comm.world_size > 1):
            continue  # ranks that are not there cannot tell what state they have, which would have to be gathered
        engine.restage(stage, {"name": name, "nvme_path": path} if "nvme" in name else name)
        assert not engine.comm.streams._held, "gradients that nobody would let go of"
        for step in (Step(), Step(2, clips=True)):
            train_step(step, engine, model, optimizer)
    engine.restage(first.stage.name, first.offload)
    for step in MIXED[-2:]:
        train_step(step, engine, model, optimizer)
    at_rest(engine)


def at_rest(engine: Any, *_: Any) -> None:
    """Nothing is kept for what the device has not done yet."""
    engine.passes.rest()
    engine.comm.streams.accelerator.synchronize()
    engine.comm.streams.drop_held()
    if engine.tiers.landing is not None:
        engine.tiers.landing._under_way.clear()


CASES = [
    Case(3, "nvme", steps=MIXED),
    Case(3, precision="bf16", steps=MIXED),
    Case(0, ranks=1, steps=MIXED),
    Case(2, "optimizer_cpu", "bf16", worker="eager", steps=MIXED),
]
PLACEHOLDERS = 100  # bytes, where the first row needs none


@pytest.mark.sample
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_has_no_race_and_gives_memory_back(case: Case, trained: Callable[..., Found]) -> None:
    found, plain = trained(case, then=walk), trained(case, then=at_rest)
    assert not found.races and not found.at_release and not found.unbound
    assert plain.at_rest <= found.at_rest <= plain.at_rest + PLACEHOLDERS
